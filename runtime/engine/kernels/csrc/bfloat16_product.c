/* `zoo_linear` with bfloat16 weights, included by kernels.c. x is rounded and laid out once per call; then threads take
 * panels, and multiply each with blocks of rows. */

/* Bytes of x that a thread multiplies with one panel after the other, so that they stay in the L2 cache. */
#define ROUND_BYTES (384 << 10)

/* One weight's panel: where its outputs are in out, and how many. */
struct place {
    int64_t which, panel, left, width;
};

/* Find panel number `panel` of the weights side by side. */
static struct place place_of(const struct part *parts, int64_t panel)
{
    struct place at = {0, panel, 0, NR};
    while (at.panel >= (parts[at.which].n + NR - 1) / NR) {
        at.panel -= (parts[at.which].n + NR - 1) / NR;
        at.left += parts[at.which].n;
        at.which++;
    }
    if (parts[at.which].n - at.panel * NR < NR) at.width = parts[at.which].n - at.panel * NR;
    return at;
}

/* Write m rows of made [m, NR], whose first `width` columns count, to out, plus add if not NULL; both `total` apart. */
INLINE void write_rows(int64_t m, int64_t width, const float *made, const float *bias, const float *add, int rounding, float *out, int64_t total)
{
    if (width < NR) {
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < width; j++) {
                float sum = made[i * NR + j] + (bias == NULL ? 0.0f : bias[j]);
                if (add != NULL) sum = add[i * total + j] + sum;
                out[i * total + j] = rounding ? rounded(sum) : sum;
            }
        return;
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < NR; j += VL) {
            vec sum = *(const vec *)(made + i * NR + j);
            if (bias != NULL) sum += *(const vec *)(bias + j);
            if (add != NULL) sum = *(const vec *)(add + i * total + j) + sum;
            *(vec *)(out + i * total + j) = rounding ? rounded_vec(sum) : sum;
        }
}

/* Round rows of x [rows, k] to pairs, `step` apart, with zeros after k, and up to row `padded`. Called in a parallel
 * region; all its threads wait at the end. */
static void lay_out_pairs(const float *x, int64_t rows, int64_t k, int64_t step, int64_t padded, uint32_t *out)
{
#pragma omp for schedule(dynamic, 16)
    for (int64_t r = 0; r < padded; r++) {
        if (r < rows) pair_up(x + r * k, k, out + r * step);
        int64_t filled = r < rows ? (k + 1) / 2 : 0;
        memset(out + r * step + filled, 0, (size_t)(step - filled) * 4);
    }
}

/* As zoo_linear. */
static int linear_narrow(const float *x, int64_t rows, int64_t k, const struct part *parts, int count, int how, const float *add, float *out,
                         int threads)
{
    const int tiles = on_tiles(), gated = how == GATED_SILU;
    const int64_t height = tiles ? TILES_HEIGHT : MR, pairs = (k + 1) / 2, full = pairs / TILE_ROWS * TILE_ROWS;
    const int64_t step = tiles ? (pairs + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : pairs;
    const int64_t padded = tiles ? (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : rows, blocks = (rows + height - 1) / height;
    int64_t total = 0, panels = 0;
    for (int c = 0; c < (gated ? 1 : count); c++) {
        total += parts[c].n;
        panels += (parts[c].n + NR - 1) / NR;
    }
    uint32_t *paired = aligned_alloc(64, (size_t)((padded * step * 4 + 63) / 64 * 64));
    if (paired == NULL) return 1;
    const int64_t most = ROUND_BYTES / (height * step * 4) + 1, rounds = (blocks + most - 1) / most;
    /* Threads take panels dynamically, an eighth of an equal share at a time, so that a thread that is descheduled does
     * not delay the end much. A panel times many rows is long enough to be taken alone. */
    const int64_t share = rows < 128 && rounds * panels / (8 * threads) > 0 ? rounds * panels / (8 * threads) : 1;
    const int64_t ahead = share > 1 ? 1 : threads; /* from a panel of a thread to its next one */
#pragma omp parallel num_threads(threads)
    {
        float buffer[2][TILES_HEIGHT * NR] ALIGNED;
        uint32_t last[TILE_ROWS * NR] ALIGNED;
        lay_out_pairs(x, rows, k, step, padded, paired);
        if (tiles) begin_tiles();
#pragma omp for schedule(dynamic, share) nowait
        for (int64_t item = 0; item < rounds * panels; item++) {
            const struct place at = place_of(parts, item % panels);
            const struct place next = place_of(parts, (item + ahead) % panels);
            const int64_t from = blocks * (item / panels) / rounds, end = blocks * (item / panels + 1) / rounds;
            for (int64_t b = from; b < end; b++) {
                const int64_t lo = tiles ? b * height : rows * b / blocks;
                const int64_t m = tiles ? (rows - lo < height ? rows - lo : height) : rows * (b + 1) / blocks - lo;
                float *to = out + lo * total + at.left + at.panel * NR;
                const float *plus = add == NULL ? NULL : add + (to - out);
                for (int64_t i = 0; i < m; i++) /* prefetch the output: it is not in the cache */
                    for (int64_t j = 0; j < at.width; j += 16) {
                        __builtin_prefetch(to + i * total + j, 1);
                        if (plus != NULL) __builtin_prefetch(plus + i * total + j);
                    }
                for (int g = 0; g <= gated; g++) {
                    const uint32_t *w = (const uint32_t *)parts[at.which + g].weight + at.panel * pairs * NR;
                    const uint32_t *then = (const uint32_t *)parts[next.which + g].weight + next.panel * pairs * NR;
                    if (!tiles) { /* the second and the third block prefetch the halves of the next panel */
                        const uint32_t *fetch = b == from ? NULL : b == from + 1 ? then : b == from + 2 ? then + pairs * (NR / 2) : w;
                        rows_tile_narrow(m, pairs, step, paired + lo * step, w, fetch, buffer[g], NR);
                        continue;
                    }
                    if (full < pairs) {
                        memset(last, 0, sizeof last);
                        memcpy(last, w + full * NR, (size_t)((pairs - full) * NR) * 4);
                    }
                    /* The first block fetches the panel while it reads it, those behind it fetch parts of the next panel. */
                    const int64_t shares = end - from > 4 ? 4 : end - from > 2 ? 2 : 1, part = b - from - 1;
                    const uint32_t *fetch = b == from ? w + AHEAD : then + part * (pairs * NR / shares);
                    const int64_t pace = b == from ? TILE_ROWS * NR : part < shares ? TILE_ROWS * NR / shares : 0;
                    tiles_block(m, pairs, paired + lo * step, step, w, last, fetch, pace, buffer[g], NR);
                }
                const float *bias = parts[at.which].bias == NULL ? NULL : parts[at.which].bias + at.panel * NR;
                if (gated) {
                    const float *other = parts[at.which + 1].bias == NULL ? NULL : parts[at.which + 1].bias + at.panel * NR;
                    if (bias != NULL) write_rows(m, at.width, buffer[0], bias, NULL, 0, buffer[0], NR);
                    if (other != NULL) write_rows(m, at.width, buffer[1], other, NULL, 0, buffer[1], NR);
                    for (int64_t i = 0; i < m * NR; i += VL) *(vec *)(buffer[0] + i) = silu(*(vec *)(buffer[0] + i)) * *(vec *)(buffer[1] + i);
                    bias = NULL;
                }
                write_rows(m, at.width, buffer[0], bias, plus, how == ROUNDED, to, total);
            }
        }
        if (tiles) end_tiles();
    }
    free(paired);
    return 0;
}

/* As zoo_stored, on tiles, with a bfloat16 weight [n, k] whose rows are `apart` values apart. The weight's rows are the
 * unit's first operand, as they lie, and x is laid out as the second one: products commute and the order of a sum is the
 * unit's, so that the bits are those of a packed weight. Only rows that do not end with a tile are copied. */
static int stored_on_tiles(const float *x, int64_t rows, int64_t k, const uint16_t *w, int64_t apart, const float *bias, int64_t n, float *out,
                           int threads)
{
    const int64_t step = ((k + 1) / 2 + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS, panels = (rows + NR - 1) / NR, padded = panels * NR;
    const int64_t groups = (n + TILES_HEIGHT - 1) / TILES_HEIGHT, share = groups / (8 * threads) > 0 ? groups / (8 * threads) : 1;
    const int in_tiles = k == 2 * step && apart % 2 == 0;
    uint32_t *paired = aligned_alloc(64, (size_t)(padded * step * 4)), *columns = aligned_alloc(64, (size_t)(padded * step * 4));
    if (paired == NULL || columns == NULL) {
        free(paired);
        free(columns);
        return 1;
    }
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float buffer[TILES_HEIGHT * NR] ALIGNED;
        uint32_t *copied = aligned_alloc(64, (size_t)(TILES_HEIGHT * step * 4));
        if (copied == NULL) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        lay_out_pairs(x, rows, k, step, padded, paired);
#pragma omp for schedule(dynamic, 1)
        for (int64_t p = 0; p < panels; p++) pack_panel((const uint16_t *)paired, padded, 2 * step, 2 * step, 1, p, columns + p * step * NR);
        begin_tiles();
#pragma omp for schedule(dynamic, share) nowait
        for (int64_t g = 0; g < groups; g++) {
            if (copied == NULL) continue;
            const int64_t first = g * TILES_HEIGHT, height = n - first < TILES_HEIGHT ? n - first : TILES_HEIGHT;
            const uint16_t *from = w + first * apart;
            const int as_it_lies = in_tiles && height % TILE_ROWS == 0;
            if (!as_it_lies) {
                memset(copied, 0, (size_t)(TILES_HEIGHT * step) * 4);
                for (int64_t i = 0; i < height; i++) memcpy(copied + i * step, from + i * apart, (size_t)k * 2);
            }
            for (int64_t p = 0; p < panels; p++) {
                const int64_t lo = p * NR, m = rows - lo < NR ? rows - lo : NR;
                tiles_block(height, step, as_it_lies ? (const uint32_t *)from : copied, as_it_lies ? apart / 2 : step, columns + lo * step, NULL,
                            (const uint32_t *)(from + TILES_HEIGHT * apart), p == 0 ? TILE_ROWS * NR : 0, buffer, NR);
                for (int64_t i = 0; i < m; i++)
                    for (int64_t j = 0; j < height; j++)
                        out[(lo + i) * n + first + j] = buffer[j * NR + i] + (bias == NULL ? 0.0f : bias[first + j]);
            }
        }
        end_tiles();
        free(copied);
    }
    free(columns);
    free(paired);
    return failed;
}
