/* Attention of rows with one token each over their pages, read in place; included by kernels.c. */

/* Bytes of a virtual memory page. */
#define PAGE 4096

/* Scores of m query heads, `step` units apart, against VL keys of one head, at `offset` bytes of ks (NULL: any score):
 * scores[i * KEYS]. q is float32, or pairs of bfloat16 if PAIRED and `narrow`. Sums over dim in the order of a tile.
 * Prefetches what is at the same offset of `then`. */
INLINE void score_tile(int m, int64_t dim, const void *q, int64_t step, const char **ks, const char **then, int64_t offset, int narrow,
                       float *scores)
{
    vec acc[8];
    int64_t units = narrow ? (dim + 1) / 2 : dim;
    for (int i = 0; i < m; i++) acc[i] = (vec){0};
    for (int64_t p = 0; p < units; p += VL) {
        uvec r[VL];
        turn_keys(ks, offset, dim * (narrow ? 2 : 4), p, then, r);
        int64_t left = units - p < VL ? units - p : VL;
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++) {
            if (j >= left) break;
            if (PAIRED && narrow) {
                for (int i = 0; i < m; i++) acc[i] = dot_pairs(acc[i], r[j], (uvec){0} + ((const uint32_t *)q)[i * step + p + j]);
                continue;
            }
            const float *one = (const float *)q + (narrow ? 2 * (p + j) : p + j);
            for (int i = 0; i < m; i++) acc[i] = fused(narrow ? (vec)(r[j] << 16) : (vec)r[j], broadcast(one[i * step]), acc[i]);
            if (narrow && 2 * (p + j) + 1 < dim)
                for (int i = 0; i < m; i++) acc[i] = fused((vec)(r[j] & 0xffff0000u), broadcast(one[i * step + 1]), acc[i]);
        }
    }
    for (int i = 0; i < m; i++) *(vec *)(scores + i * KEYS) = acc[i];
}

#define SCORE(m) \
    case m: \
        if (narrow) \
            score_tile(m, dim, q, step, ks, then, offset, 1, scores); \
        else \
            score_tile(m, dim, q, step, ks, then, offset, 0, scores); \
        break;
static void score_keys(int64_t m, int64_t dim, const void *q, int64_t step, const char **ks, const char **then, int64_t offset, int narrow,
                       float *scores)
{
    switch (m) {
        SCORE(1) SCORE(2) SCORE(3) SCORE(4)
#if VL == 16
        SCORE(5) SCORE(6) SCORE(7) SCORE(8)
#endif
    }
}
/* Query heads that are scored at once. */
#define SCORED (VL == 16 ? 8 : 4)

/* acc[i * width] += weights[i * KEYS + t] * V of keys t in [begin, end), for m query heads and c vectors of V at `offset`
 * values of vs. Sums over keys in the order of `tile`, from zero. Prefetches what is at the same offset of `then`. */
INLINE void value_tile(int m, int c, int64_t begin, int64_t end, const float *weights, const char **vs, const char **then, int64_t offset,
                       int narrow, double *acc, int64_t width)
{
    vec made[4][4];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < c; j++) made[i][j] = (vec){0};
    for (int64_t t = begin; t < end; t++) {
        vec b[4];
        for (int j = 0; j < c; j++) b[j] = load_of(vs[t], offset + j * VL, narrow);
        if (then != NULL && then[t] != NULL)
            for (int j = 0; j < c * VL * (narrow ? 2 : 4); j += 64) __builtin_prefetch(then[t] + offset * (narrow ? 2 : 4) + j, 0, 2);
        for (int i = 0; i < m; i++) {
            vec s = broadcast(weights[i * KEYS + t]);
            for (int j = 0; j < c; j++) made[i][j] = fused(b[j], s, made[i][j]);
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < c; j++) add_wide(acc + i * width + j * VL, made[i][j]);
}

/* As value_tile, over pairs of keys and weights [KEYS / 2] per head, in the order of `tile_narrow`. */
INLINE void pair_values(int m, int c, int64_t begin, int64_t end, const uint32_t *weights, const char **vs, const char **then, int64_t offset,
                        double *acc, int64_t width)
{
    vec made[4][4];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < c; j++) made[i][j] = (vec){0};
    for (int64_t p = begin / 2; p < (end + 1) / 2; p++) {
        uvec b[4];
        for (int j = 0; j < c; j++) b[j] = pairs_of(vs[2 * p], vs[2 * p + 1], offset + j * VL, VL);
        for (int64_t t = 2 * p; t < 2 * p + 2 && then != NULL; t++)
            for (int j = 0; j < c * VL * 2 && then[t] != NULL; j += 64) __builtin_prefetch(then[t] + offset * 2 + j, 0, 2);
        for (int i = 0; i < m; i++) {
            uvec s = (uvec){0} + weights[i * (KEYS / 2) + p];
            for (int j = 0; j < c; j++) made[i][j] = dot_pairs(made[i][j], b[j], s);
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < c; j++) add_wide(acc + i * width + j * VL, made[i][j]);
}

/* As value_tile, for one query head and the values from `offset` up to dim, fewer than a vector. `paired`: as pair_values. */
INLINE void value_rest(int64_t begin, int64_t end, const float *weights, const uint32_t *paired, const char **vs, int64_t offset, int64_t rest,
                       int narrow, double *acc)
{
    vec made = {0};
    if (PAIRED && narrow) {
        for (int64_t p = begin / 2; p < (end + 1) / 2; p++)
            made = dot_pairs(made, pairs_of(vs[2 * p], vs[2 * p + 1], offset, rest), (uvec){0} + paired[p]);
    } else {
        for (int64_t t = begin; t < end; t++) {
            vec b = {0};
            for (int64_t j = 0; j < rest; j++) b[j] = value_of(vs[t], offset + j, narrow);
            made = fused(b, broadcast(weights[t]), made);
        }
    }
    add_wide(acc, made);
}

#define HEADS_VALUES(m, c) \
    if (PAIRED && narrow) \
        pair_values(m, c, begin, end, pairs, vs, g == h * group ? then : NULL, h * dim + d, o + d, width); \
    else \
        value_tile(m, c, begin, end, mine, vs, g == h * group ? then : NULL, h * dim + d, narrow, o + d, width);
#define VALUES(c) \
    switch (m) { \
        case 4: HEADS_VALUES(4, c) break; \
        case 3: HEADS_VALUES(3, c) break; \
        case 2: HEADS_VALUES(2, c) break; \
        default: HEADS_VALUES(1, c) \
    }
/* Attend with the query heads of KV heads [first, first + heads) over the tokens of one row, at most SPLIT.
 *
 * q [heads * group, dim]; out [heads * group, width], dim rounded up to vectors, is not divided: softmax(q K^T) V = out / sum, with
 * each query head's exponent and sum (softmax.c). A token's heads are contiguous and read together. V is prefetched while
 * K is read, and the next K while V is read, at the end that of row `next`, which probably follows: runs as short as a KV
 * page defeat the hardware prefetcher. Scratch: scores [heads * group, KEYS]; if PAIRED and narrow, pairs for q and for
 * softmax's weights, `pairs_room` of them. */
INLINE void attend_part(int64_t heads, int64_t group, int64_t dim, const float *q, const struct pages *pages, const struct reach *row,
                        const struct reach *next, int64_t first, int64_t kv_heads, int narrow, float scale, float cap, float *scores,
                        uint32_t *paired, double *out, double *exponents, double *sums)
{
    const char *places[2][2][KEYS];
    const int64_t size = narrow ? 2 : 4, width = (dim + VL - 1) / VL * VL;
    int64_t all = heads * group, lo = row->lo, hi = row->hi, units = (dim + 1) / 2;
    uint32_t *weights = paired + all * units;
    if (PAIRED && narrow)
        for (int64_t g = 0; g < all; g++) pair_up(q + g * dim, dim, paired + g * units);
    const int64_t *table = row->table;
    for (int64_t g = 0; g < all; g++) {
        exponents[g] = -INFINITY;
        sums[g] = 0.0;
    }
    memset(out, 0, (size_t)(all * width) * 8);
    /* address translation takes as long as reading, so touch all pages first */
    int64_t step = PAGE / (kv_heads * dim * size) + 1;
    for (int64_t at = lo; at < hi; at += step) {
        int64_t place = table[at / pages->page_tokens] * pages->page_stride + at % pages->page_tokens * kv_heads * dim;
        __builtin_prefetch(pages->k + place * size);
        __builtin_prefetch(pages->v + place * size);
    }
    int64_t from = lo / KEYS * KEYS;
    find(pages, row, from, first, kv_heads, dim, size, places[0][0], places[0][1]);
    for (int64_t side = 0; from < hi; from += KEYS, side ^= 1) {
        const char **ks = places[side][0], **vs = places[side][1], **then = places[side ^ 1][0];
        int64_t begin = lo > from ? lo - from : 0, end = hi - from < KEYS ? hi - from : KEYS;
        if (from + KEYS < hi)
            find(pages, row, from + KEYS, first, kv_heads, dim, size, then, places[side ^ 1][1]);
        else
            find(pages, next, next->lo / KEYS * KEYS, first, kv_heads, dim, size, then, places[side ^ 1][1]);
        for (int64_t t = begin / VL * VL; t < end; t += VL)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t g = 0; g < group; g += SCORED)
                    score_keys(group - g < SCORED ? group - g : SCORED, dim,
                               PAIRED && narrow ? (const void *)(paired + (h * group + g) * units) : q + (h * group + g) * dim,
                               PAIRED && narrow ? units : dim, ks + t, g == 0 ? vs + t : NULL, h * dim * size, narrow,
                               scores + (h * group + g) * KEYS + t);
        for (int64_t g = 0; g < all; g++) {
            soften(begin, end, scale, cap, scores + g * KEYS, exponents + g, sums + g, out + g * width, width, narrow);
            if (PAIRED && narrow) pair_up(scores + g * KEYS, KEYS, weights + g * (KEYS / 2));
        }
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t g = h * group; g < (h + 1) * group;) {
                int64_t m = (h + 1) * group - g < 4 ? (h + 1) * group - g : 4, d = 0;
                const float *mine = scores + g * KEYS;
                const uint32_t *pairs = weights + g * (KEYS / 2);
                double *o = out + g * width;
                for (; d + 4 * VL <= dim; d += 4 * VL) VALUES(4);
                for (; d + VL <= dim; d += VL) VALUES(1);
                for (int64_t i = 0; i < m && d < dim; i++)
                    value_rest(begin, end, mine + i * KEYS, pairs + i * (KEYS / 2), vs, h * dim + d, dim - d, narrow, o + i * width + d);
                g += m;
            }
        }
    }
}

/* Pairs of scratch that attend_part, or attend_on_tiles, needs for `heads` KV heads of `group` query heads each. */
static int64_t pairs_room(const struct pages *pages, int64_t heads, int64_t group, int64_t dim)
{
#if PAIRED
    if (ON_TILES(pages)) return tiles_room(heads, group, dim);
#endif
    return PAIRED && pages->narrow ? heads * group * ((dim + 1) / 2 + KEYS / 2) : 0;
}

#define ATTEND(D) \
    do { \
        if (pages->narrow) \
            attend_part(heads, group, D, q, pages, row, next, first, kv_heads, 1, scale, cap, scores, paired, out, exponents, sums); \
        else \
            attend_part(heads, group, D, q, pages, row, next, first, kv_heads, 0, scale, cap, scores, paired, out, exponents, sums); \
    } while (0)
/* Attend with the fastest code for this processor and these sizes; constant ones let the compiler unroll. */
static void attend_any(int64_t heads, int64_t group, int64_t dim, const float *q, const struct pages *pages, const struct reach *row,
                       const struct reach *next, int64_t first, int64_t kv_heads, float scale, float cap, float *scores,
                       uint32_t *paired, double *out, double *exponents, double *sums)
{
#if PAIRED
    if (ON_TILES(pages)) {
        attend_on_tiles(heads, group, dim, q, pages, row, next, first, kv_heads, scale, cap, scores, paired, out, exponents, sums);
        return;
    }
#endif
    switch (dim) {
        case 64: ATTEND(64); break;
        case 128: ATTEND(128); break;
        default: ATTEND(dim);
    }
}

/* The tokens that part number `split` of row r reads. */
static struct reach reach_of(const struct pages *pages, const int64_t *rows_of, const int64_t *lengths, int64_t r, int64_t split,
                             int64_t window)
{
    int64_t first = window > 0 && lengths[r] > window ? lengths[r] - window : 0, lo = split * SPLIT;
    struct reach row = {pages->tables + (rows_of == NULL ? r : rows_of[r]) * pages->table_stride, lo > first ? lo : first,
                        lo + SPLIT < lengths[r] ? lo + SPLIT : lengths[r]};
    return row;
}

/* Attend with one query token per row over its pages.
 *
 * q: token tokens[r] (r if NULL) at q + token * q_stride, [heads, dim]; out likewise, heads * dim apart. lengths
 * [rows]: tokens of the row, this one included. rows_of [rows]: its row in the tables (r if NULL). window: attend to
 * the last `window` tokens only, 0 for all. cap: soft cap, 0 for none. sums: NULL, or doubles for what is not divided, as
 * put_out writes it; out is of doubles then. A row of no tokens gives zeros. Returns 0, or 1 if out of memory. */
int zoo_decode(const float *q, int64_t q_stride, const int64_t *tokens, const int64_t *rows_of, const int64_t *lengths, int64_t rows,
               int64_t heads, int64_t kv_heads, int64_t dim, const struct pages *pages, int64_t window, float scale, float cap,
               void *out, double *sums, int threads)
{
    int64_t group = heads / kv_heads, longest = 0;
    for (int64_t r = 0; r < rows; r++) longest = lengths[r] > longest ? lengths[r] : longest;
    int64_t splits = (longest + SPLIT - 1) / SPLIT;
    int64_t at_once = rows * splits >= 2 * threads ? kv_heads : 1; /* with few rows, threads share a row's heads */
    int64_t shares = kv_heads / at_once, padded = (dim + VL - 1) / VL * VL, width = heads * (padded + 2);
    int64_t room = pairs_room(pages, at_once, group, dim);
    const int tiles = ON_TILES(pages);
    double *parts = malloc((size_t)(rows * splits * width + 1) * 8); /* [rows, splits]: out [heads, padded], exponents, sums [heads] */
    if (parts == NULL) return 1;
#pragma omp parallel num_threads(threads)
    {
        float scores[at_once * group * KEYS] ALIGNED;
        double total[padded] ALIGNED;
        uint32_t paired[room + 1] ALIGNED;
        if (tiles) begin_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t each = 0; each < rows * splits * shares; each++) {
            int64_t r = each / shares / splits, split = each / shares % splits, head = each % shares * at_once;
            int64_t later = each / shares / splits + threads;
            struct reach row = reach_of(pages, rows_of, lengths, r, split, window), next = row;
            next.hi = next.lo;
            if (at_once == kv_heads && splits == 1 && later < rows) next = reach_of(pages, rows_of, lengths, later, 0, window);
            double *o = parts + each / shares * width, *exponents = o + heads * padded + head * group, *weights = exponents + heads;
            if (row.lo >= row.hi) {
                for (int64_t g = 0; g < at_once * group; g++) exponents[g] = -INFINITY;
                continue;
            }
            const float *mine = q + (tokens == NULL ? r : tokens[r]) * q_stride + head * group * dim;
            attend_any(at_once, group, dim, mine, pages, &row, &next, head, kv_heads, scale, cap, scores, paired,
                       o + head * group * padded, exponents, weights);
        }
        if (tiles) end_tiles();
#pragma omp for schedule(dynamic, SHARE(rows * heads))
        for (int64_t each = 0; each < rows * heads; each++) {
            int64_t r = each / heads, head = each % heads;
            int64_t place = (tokens == NULL ? r : tokens[r]) * heads + head;
            const double *part = parts + r * splits * width;
            double exponent = -INFINITY, sum = 0.0;
            memset(total, 0, (size_t)padded * 8);
            for (int64_t s = 0; s < splits; s++, part += width)
                add_part(part + head * padded, part[heads * padded + head], part[heads * (padded + 1) + head], total, &exponent, &sum, padded);
            put_out(total, exponent, sum, out, sums, place, dim);
        }
    }
    free(parts);
    return 0;
}
