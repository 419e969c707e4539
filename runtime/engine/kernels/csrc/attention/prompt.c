/* Attention of chunks of prompts, whose K and V are first laid out for tiles; included by kernels.c. */

/* A chunk of a prompt: consecutive tokens of one row, each attending to the row's tokens up to itself, as far as the row's
 * pages hold them. */
struct chunk {
    int64_t token; /* index of the first one in q and out */
    int64_t count;
    int64_t start; /* its position: the number of the row's tokens before it */
    int64_t row;   /* in the tables */
    int64_t held;  /* tokens in the row's pages */
};

/* Lay out K of one row and KV head as panels [panels][dim][NR], V as [dim panels][padded][NR], zeros after the end; in
 * float32. `wide`: scratch for the K of four tokens of bfloat16. */
static void lay_out_head(const struct pages *pages, const int64_t *table, int64_t head, int64_t kv_heads, int64_t dim, int64_t length,
                         int64_t padded, float *wide, float *k_out, float *v_out)
{
    int64_t slabs = (dim + NR - 1) / NR, size = pages->narrow ? 2 : 4;
    memset(v_out, 0, (size_t)(slabs * padded * NR) * 4);
    const float *ks[4];
    for (int64_t t = 0; t < padded; t++) {
        float *k = k_out + t / NR * dim * NR + t % NR;
        if (t >= length) {
            for (int64_t i = 0; i < dim; i++) k[i * NR] = 0.0f;
            continue;
        }
        int64_t place = table[t / pages->page_tokens] * pages->page_stride + (t % pages->page_tokens * kv_heads + head) * dim, i = 0;
        const char *from = pages->k + place * size, *v = pages->v + place * size;
        if (pages->narrow) {
            for (int64_t d = 0; d < dim; d++) wide[t % 4 * dim + d] = value_of(from, d, 1);
            ks[t % 4] = wide + t % 4 * dim;
        } else {
            ks[t % 4] = (const float *)from;
        }
        if (t % 4 == 3) { /* four tokens at once; NR is a multiple of four */
            for (; i + 4 <= dim; i += 4) turn(ks[0] + i, ks[1] + i, ks[2] + i, ks[3] + i, k - 3 + i * NR, NR);
            for (; i < dim; i++)
                for (int64_t j = 0; j < 4; j++) k[i * NR + j - 3] = ks[j][i];
        } else if (t >= length / 4 * 4) {
            for (; i < dim; i++) k[i * NR] = ks[t % 4][i];
        }
        for (int64_t s = 0; s < slabs; s++) {
            int64_t width = dim - s * NR < NR ? dim - s * NR : NR;
            float *to = v_out + (s * padded + t) * NR;
            if (!pages->narrow)
                memcpy(to, v + s * NR * 4, (size_t)width * 4);
            else
                for (int64_t d = 0; d < width; d++) to[d] = value_of(v, s * NR + d, 1);
        }
    }
}

/* As lay_out_head, if PAIRED and the pages are bfloat16: K as panels [panels][units][NR] of pairs of a key's values, zeros after
 * the end, V as [dim panels][padded / 2][NR] of pairs of keys. */
static void lay_out_pairs_of_head(const struct pages *pages, const int64_t *table, int64_t head, int64_t kv_heads, int64_t dim, int64_t units,
                                  int64_t length, int64_t padded, uint32_t *k_out, uint32_t *v_out)
{
    for (int64_t from = 0; from < padded; from += VL, k_out += from % NR == 0 ? units * NR : 0) {
        const char *ks[VL], *vs[VL];
        for (int64_t t = 0; t < VL; t++) {
            ks[t] = vs[t] = NULL;
            if (from + t >= length) continue;
            int64_t at = from + t, place = table[at / pages->page_tokens] * pages->page_stride + (at % pages->page_tokens * kv_heads + head) * dim;
            ks[t] = pages->k + place * 2, vs[t] = pages->v + place * 2;
        }
        for (int64_t p = 0; p < units; p += VL) {
            uvec r[VL];
            turn_keys(ks, 0, dim * 2, p, NULL, r);
            for (int64_t j = 0; j < VL && p + j < units; j++) *(uvec *)(k_out + (p + j) * NR + from % NR) = r[j];
        }
        for (int64_t t = 0; t < VL; t += 2)
            for (int64_t d = 0; d < (dim + NR - 1) / NR * NR; d += VL)
                *(uvec *)(v_out + (d / NR * (padded / 2) + (from + t) / 2) * NR + d % NR) =
                    d < dim ? pairs_of(vs[t], vs[t + 1], d, dim - d) : (uvec){0};
    }
}

/* Panels of keys per softmax update. */
#define PANELS (KEYS / NR)
/* Most query rows of a block. */
#define BLOCK (MR > TILES_HEIGHT ? MR : TILES_HEIGHT)

/* Multiply m rows of pairs, `step` apart, with a panel of `pairs` of them -> out, rows `across` apart. */
INLINE void rows_of_pairs(int tiles, int64_t m, int64_t pairs, const uint32_t *x, int64_t step, const uint32_t *panel, float *out, int64_t across)
{
    if (tiles)
        tiles_block(m, pairs, x, step, panel, NULL, NULL, 0, out, across);
    else
        rows_tile_narrow(m, pairs, step, x, panel, NULL, out, across);
}

/* Attend with a block of m query rows of one head, the first at position `first`, over the laid out K and V of their
 * row, which has `held` tokens; `paired`: of lay_out_pairs_of_head, with so many units, else 0. out, sums, place: of the first row, as
 * put_out; rows are `heads` places apart. Scratch: acc for m rows of the padded width; mine for m rows, or whole tiles of them, of dim
 * floats or of units. */
static void attend_block(int64_t m, int64_t dim, const float *q, int64_t q_stride, const void *k, const void *v, int64_t padded, int64_t paired,
                         int tiles, int64_t first, int64_t held, int64_t window, float scale, float cap, double *acc, float *mine, void *out,
                         double *sums, int64_t place, int64_t heads)
{
    float scores[BLOCK * KEYS] ALIGNED, made[BLOCK * NR] ALIGNED;
    double exponents[BLOCK], totals[BLOCK];
    uint32_t weights[BLOCK * KEYS / 2] ALIGNED, *queries = (uint32_t *)mine;
    if (tiles) { /* rows and units that do not count */
        memset(queries, 0, (size_t)(whole_tiles(m) * paired) * 4);
        memset(weights + m * (KEYS / 2), 0, (size_t)((whole_tiles(m) - m) * (KEYS / 2)) * 4);
    }
    int64_t slabs = (dim + NR - 1) / NR, width = slabs * NR, end = ((first + m < held ? first + m : held) + NR - 1) / NR;
    for (int64_t i = 0; i < m; i++) { /* q is copied, because rows a page apart would evict each other */
        exponents[i] = -INFINITY, totals[i] = 0.0;
        if (paired)
            pair_up(q + i * q_stride, dim, queries + i * paired);
        else
            memcpy(mine + i * dim, q + i * q_stride, (size_t)dim * 4);
    }
    memset(acc, 0, (size_t)(m * width) * 8);
    int64_t lo = window > 0 && first + 1 > window ? (first + 1 - window) / KEYS * PANELS : 0;
    for (int64_t panel = lo; panel < end; panel += PANELS) {
        int64_t count = end - panel < PANELS ? end - panel : PANELS;
        for (int64_t p = panel; p < panel + count; p++)
            if (paired)
                rows_of_pairs(tiles, m, paired, queries, paired, (const uint32_t *)k + p * paired * NR, scores + (p - panel) * NR, KEYS);
            else
                rows_tile(m, dim, dim, mine, (const float *)k + p * dim * NR, NULL, scores + (p - panel) * NR, KEYS);
        for (int64_t i = 0; i < m; i++) {
            int64_t after = first + i + 1 - panel * NR, before = window > 0 ? after - window : 0;
            after = after < held - panel * NR ? after : held - panel * NR;
            after = after < 0 ? 0 : after < KEYS ? after : KEYS;
            before = before < 0 ? 0 : before < KEYS ? before : KEYS;
            soften(before, after, scale, cap, scores + i * KEYS, exponents + i, totals + i, acc + i * width, width, paired);
            if (paired) pair_up(scores + i * KEYS, KEYS, weights + i * (KEYS / 2));
        }
        for (int64_t s = 0; s < slabs; s++) {
            if (paired)
                rows_of_pairs(tiles, m, count * NR / 2, weights, KEYS / 2, (const uint32_t *)v + (s * padded + panel * NR) / 2 * NR, made, NR);
            else
                rows_tile(m, count * NR, KEYS, scores, (const float *)v + (s * padded + panel * NR) * NR, NULL, made, NR);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < NR; j += VL) add_wide(acc + i * width + s * NR + j, *(vec *)(made + i * NR + j));
        }
    }
    for (int64_t i = 0; i < m; i++) put_out(acc + i * width, exponents[i], totals[i], out, sums, place + i * heads, dim);
}

/* Attend with every chunk's tokens over their rows' pages, which end with these tokens. q: token t at q + t * q_stride,
 * [heads, dim]; out likewise, heads * dim apart. window, scale, cap, sums, result as in zoo_decode. */
int zoo_chunks(const float *q, int64_t q_stride, const struct chunk *chunks, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,
               const struct pages *pages, int64_t window, float scale, float cap, void *out, double *sums, int threads)
{
    const int tiles = ON_TILES(pages);
    const int64_t units = (dim + 1) / 2, paired = !PAIRED || !pages->narrow ? 0 : tiles ? whole_tiles(units) : units;
    const int64_t height = tiles ? TILES_HEIGHT : MR;
    int64_t group = heads / kv_heads, slabs = (dim + NR - 1) / NR, blocks = 0, room = 0;
    const int64_t k_size = paired ? paired : dim, size = k_size + (paired ? slabs * NR / 2 : slabs * NR); /* floats per token */
    int64_t *offsets = malloc((size_t)(2 * count + 2) * 8), *firsts = offsets + count + 1;
    if (offsets == NULL) return 1;
    for (int64_t c = 0; c < count; c++) { /* offset of each chunk's K and V, and number of its first block */
        offsets[c] = room;
        firsts[c] = blocks;
        room += kv_heads * ((chunks[c].held + NR - 1) / NR * NR) * size;
        blocks += (chunks[c].count + height - 1) / height * heads;
    }
    float *laid = aligned_alloc(64, (size_t)((room * 4 + 64) / 64 * 64));
    if (laid == NULL) {
        free(offsets);
        return 1;
    }
#pragma omp parallel num_threads(threads)
    {
        double acc[height * slabs * NR] ALIGNED;
        float mine[height * (paired > dim ? paired : dim)] ALIGNED, wide[4 * dim] ALIGNED;
        if (tiles) begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t each = 0; each < count * kv_heads; each++) {
            const struct chunk *chunk = &chunks[each / kv_heads];
            int64_t length = chunk->held, padded = (length + NR - 1) / NR * NR, head = each % kv_heads;
            const int64_t *table = pages->tables + chunk->row * pages->table_stride;
            float *k = laid + offsets[each / kv_heads] + head * padded * size, *v = k + padded * k_size;
            if (paired)
                lay_out_pairs_of_head(pages, table, head, kv_heads, dim, paired, length, padded, (uint32_t *)k, (uint32_t *)v);
            else
                lay_out_head(pages, table, head, kv_heads, dim, length, padded, wide, k, v);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t each = blocks - 1; each >= 0; each--) { /* the longest first */
            int64_t c = count - 1;
            while (firsts[c] > each) c--;
            const struct chunk *chunk = &chunks[c];
            int64_t block = (each - firsts[c]) / heads, head = (each - firsts[c]) % heads, lo = block * height;
            int64_t padded = (chunk->held + NR - 1) / NR * NR, m = chunk->count - lo < height ? chunk->count - lo : height;
            const float *k = laid + offsets[c] + head / group * padded * size;
            int64_t place = (chunk->token + lo) * heads + head;
            attend_block(m, dim, q + (chunk->token + lo) * q_stride + head * dim, q_stride, k, k + padded * k_size, padded, paired, tiles,
                         chunk->start + lo, chunk->held, window, scale, cap, acc, mine, out, sums, place, heads);
        }
        if (tiles) end_tiles();
    }
    free(laid);
    free(offsets);
    return 0;
}
