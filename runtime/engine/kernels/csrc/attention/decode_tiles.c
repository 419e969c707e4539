/* Attention of one token of a row on a tile unit (amx.c), over pages of bfloat16; included by kernels.c.
 *
 * Keys are the unit's first operand, as they lie in a page, and the query heads of their KV head the second one: products
 * commute, so that scores have the bits of prompt.c's. V is laid out as there, KEYS keys at a time.
 */

/* Tokens [lo, hi) of a row. */
struct reach {
    const int64_t *table;
    int64_t lo, hi;
};

/* Find K and V of a row's tokens from `from` on, up to its end and KEYS of them, for KV heads from `first` on; NULL for
 * tokens that it does not reach. */
INLINE void find(const struct pages *pages, const struct reach *row, int64_t from, int64_t first, int64_t kv_heads, int64_t dim, int64_t size,
                 const char **ks, const char **vs)
{
    int64_t group = from / pages->page_tokens, slot = from % pages->page_tokens;
    for (int64_t t = 0; t < KEYS; t++) {
        ks[t] = vs[t] = NULL;
        if (from + t >= row->lo && from + t < row->hi) {
            int64_t place = row->table[group] * pages->page_stride + (slot * kv_heads + first) * dim;
            ks[t] = pages->k + place * size;
            vs[t] = pages->v + place * size;
        }
        if (++slot == pages->page_tokens) group++, slot = 0;
    }
}

#if PAIRED
/* Scores of KEYS keys with TILE_ROWS query heads, columns [units][TILE_ROWS] of pairs, units in whole tiles -> out [KEYS][TILE_ROWS].
 * keys: where each TILE_ROWS keys begin, which are `apart` bytes apart. */
#define TILES_SCORES(NAME, ATTRIBUTE, ZERO, LOAD, DOT, STORE) \
    ATTRIBUTE static void NAME(int64_t units, const char *const *keys, const int64_t *apart, const uint32_t *columns, float *out) \
    { \
        ZERO(0); \
        ZERO(1); \
        ZERO(2); \
        ZERO(3); \
        for (int64_t p = 0; p < units; p += TILE_ROWS) { \
            LOAD(7, columns + p * TILE_ROWS, TILE_ROWS * 4); \
            LOAD(4, keys[0] + p * 4, apart[0]); \
            DOT(0, 4, 7); \
            LOAD(5, keys[1] + p * 4, apart[1]); \
            DOT(1, 5, 7); \
            LOAD(6, keys[2] + p * 4, apart[2]); \
            DOT(2, 6, 7); \
            LOAD(4, keys[3] + p * 4, apart[3]); \
            DOT(3, 4, 7); \
        } \
        STORE(0, out, TILE_ROWS * 4); \
        STORE(1, out + TILE_ROWS * TILE_ROWS, TILE_ROWS * 4); \
        STORE(2, out + 2 * TILE_ROWS * TILE_ROWS, TILE_ROWS * 4); \
        STORE(3, out + 3 * TILE_ROWS * TILE_ROWS, TILE_ROWS * 4); \
    }
#define TILES_OF_KEYS (KEYS / TILE_ROWS)
_Static_assert(TILES_OF_KEYS == 4 && VL == TILE_ROWS, "the scores of four tiles of keys are turned as vectors");

TILES_SCORES(emulated_scores, __attribute__((noinline)), emulated_zero, emulated_load, emulated_dot, emulated_store)
#if defined(WITH_TILES)
TILES_SCORES(unit_scores, WITH_TILES __attribute__((noinline)), _tile_zero, _tile_loadd, _tile_dpbf16ps, _tile_stored)
#else
#define unit_scores emulated_scores
#endif

/* Lay out the queries of a KV head as columns [sets][units][TILE_ROWS]; what is in columns without a query does not matter. */
static void lay_out_queries(const float *q, int64_t group, int64_t dim, int64_t units, uint32_t *columns)
{
    uint32_t pairs[TILE_ROWS * units] ALIGNED;
    memset(pairs, 0, sizeof pairs);
    for (int64_t set = 0; set < group; set += TILE_ROWS, columns += units * TILE_ROWS) {
        const int64_t count = group - set < TILE_ROWS ? group - set : TILE_ROWS;
        for (int64_t g = 0; g < count; g++) pair_up(q + (set + g) * dim, dim, pairs + g * units);
        for (int64_t p = 0; p < units; p += VL) {
            uvec r[VL];
            for (int i = 0; i < VL; i++) r[i] = *(const uvec *)(pairs + i * units + p);
            transpose(r);
            for (int i = 0; i < VL; i++) *(uvec *)(columns + (p + i) * TILE_ROWS) = r[i];
        }
    }
}

/* Find each TILE_ROWS keys of ks, at `offset` bytes: where the first one begins, and the bytes to the next. Only what [begin, end)
 * has counts. `in_place`: TILE_ROWS keys lie in one page, in whole tiles; else they are copied to `copied` [KEYS][units]. */
static void find_tiles(const char **ks, int64_t offset, int64_t begin, int64_t end, int64_t bytes, int64_t stride, int in_place, int64_t units,
                       uint32_t *copied, const char **keys, int64_t *apart)
{
    for (int64_t tile = 0; tile < TILES_OF_KEYS; tile++) {
        int64_t t = tile * TILE_ROWS, lo = begin > t ? begin : t, hi = end < t + TILE_ROWS ? end : t + TILE_ROWS;
        keys[tile] = (const char *)(copied + t * units);
        apart[tile] = units * 4;
        if (lo >= hi) {
            apart[tile] = 0; /* any readable row */
        } else if (in_place) {
            keys[tile] = ks[lo] + offset - (lo - t) * stride;
            apart[tile] = stride;
        } else {
            memset(copied + t * units, 0, (size_t)(TILE_ROWS * units) * 4);
            for (; lo < hi; lo++) memcpy(copied + lo * units, ks[lo] + offset, (size_t)bytes);
        }
    }
}

/* Turn scores [KEYS][TILE_ROWS] to those of `count` query heads, KEYS apart. */
INLINE void turn_scores(const float *made, int64_t count, float *scores)
{
    for (int64_t t = 0; t < KEYS; t += VL) {
        uvec r[VL];
        for (int i = 0; i < VL; i++) r[i] = *(const uvec *)(made + (t + i) * TILE_ROWS);
        transpose(r);
        for (int64_t g = 0; g < count; g++) *(uvec *)(scores + g * KEYS + t) = r[g];
    }
}

/* Prefetch `bytes` of what each of `count` places has at `offset`. */
INLINE void prefetch_all(const char *const *places, int64_t count, int64_t offset, int64_t bytes)
{
    for (int64_t t = 0; t < count; t++)
        for (int64_t b = 0; b < bytes && places[t] != NULL; b += 64) __builtin_prefetch(places[t] + offset + b, 0, 2);
}

/* Lay out V of KEYS keys, at `offset` values of vs, as panels [slabs][KEYS / 2][NR] of `pairs` pairs of keys, zeros where there are
 * no keys or values. Prefetches what is at the same offset of `then`. */
static void lay_out_values(const char **vs, int64_t offset, int64_t dim, int64_t pairs, const char **then, uint32_t *laid)
{
    const uint16_t none[NR] ALIGNED = {0};
    uint16_t order[2][NR] ALIGNED; /* of values of two keys, by turns */
    for (int i = 0; i < NR; i++) order[0][i] = (uint16_t)(i % 2 * NR + i / 2), order[1][i] = (uint16_t)(order[0][i] + NR / 2);
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (int64_t p = 0; p < pairs; p++) {
        prefetch_all(then + 2 * p, 2, offset * 2, dim * 2);
        for (int64_t d = 0; d < dim; d += NR) {
            const __mmask32 count = dim - d < NR ? ((__mmask32)1 << (dim - d)) - 1 : ~(__mmask32)0;
            const __m512i even = _mm512_maskz_loadu_epi16(count, vs[2 * p] == NULL ? none : (const uint16_t *)vs[2 * p] + offset + d);
            const __m512i odd = _mm512_maskz_loadu_epi16(count, vs[2 * p + 1] == NULL ? none : (const uint16_t *)vs[2 * p + 1] + offset + d);
            uint32_t *to = laid + (d / NR * (KEYS / 2) + p) * NR;
            _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to + VL, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
    prefetch_all(then + 2 * pairs, KEYS - 2 * pairs, offset * 2, dim * 2);
}

/* Units of scratch that attend_on_tiles needs for `heads` KV heads of `group` query heads each. */
static int64_t tiles_room(int64_t heads, int64_t group, int64_t dim)
{
    int64_t units = whole_tiles((dim + 1) / 2), slabs = (dim + NR - 1) / NR;
    return heads * whole_tiles(group) * units + (heads * group + TILE_ROWS) * (KEYS / 2) + slabs * NR * (KEYS / 2) + KEYS * units;
}

/* As attend_any. Scratch: scores [heads * group, KEYS]; `paired`: tiles_room. */
static void attend_on_tiles(int64_t heads, int64_t group, int64_t dim, const float *q, const struct pages *pages, const struct reach *row,
                            const struct reach *next, int64_t first, int64_t kv_heads, float scale, float cap, float *scores, uint32_t *paired,
                            double *out, double *exponents, double *sums)
{
    const char *places[2][2][KEYS], *keys[TILES_OF_KEYS];
    float made[KEYS * TILE_ROWS] ALIGNED;
    int64_t apart[TILES_OF_KEYS];
    const int64_t units = whole_tiles((dim + 1) / 2), width = (dim + VL - 1) / VL * VL, slabs = (dim + NR - 1) / NR, all = heads * group;
    const int64_t bytes = dim * 2, stride = kv_heads * bytes, set = TILE_ROWS * units, mine = whole_tiles(group) * units, lo = row->lo, hi = row->hi;
    const int in_place = pages->page_tokens % TILE_ROWS == 0 && dim == 2 * units;
    uint32_t *columns = paired, *weights = columns + heads * mine, *laid = weights + (all + TILE_ROWS) * (KEYS / 2), *copied = laid + slabs * NR * (KEYS / 2);
    memset(weights + all * (KEYS / 2), 0, TILE_ROWS * (KEYS / 2) * 4);
    memset(copied, 0, (size_t)units * 4);
    for (int64_t h = 0; h < heads; h++) lay_out_queries(q + h * group * dim, group, dim, units, columns + h * mine);
    for (int64_t g = 0; g < all; g++) exponents[g] = -INFINITY, sums[g] = 0.0;
    memset(out, 0, (size_t)(all * width) * 8);
    int64_t from = lo / KEYS * KEYS;
    find(pages, row, from, first, kv_heads, dim, 2, places[0][0], places[0][1]);
    for (int64_t side = 0; from < hi; from += KEYS, side ^= 1) {
        const char **ks = places[side][0], **vs = places[side][1], **then = places[side ^ 1][0];
        const struct reach *after = from + KEYS < hi ? row : next;
        int64_t begin = lo > from ? lo - from : 0, end = hi - from < KEYS ? hi - from : KEYS, pairs = end > KEYS / 2 ? KEYS / 2 : KEYS / 4;
        find(pages, after, after == row ? from + KEYS : next->lo / KEYS * KEYS, first, kv_heads, dim, 2, then, places[side ^ 1][1]);
        for (int64_t h = 0; h < heads; h++) {
            find_tiles(ks, h * bytes, begin, end, bytes, stride, in_place, units, copied, keys, apart);
            for (int64_t g = 0; g < group; g += TILE_ROWS) {
                if (path == EMULATED)
                    emulated_scores(units, keys, apart, columns + h * mine + g / TILE_ROWS * set, made);
                else
                    unit_scores(units, keys, apart, columns + h * mine + g / TILE_ROWS * set, made);
                turn_scores(made, group - g < TILE_ROWS ? group - g : TILE_ROWS, scores + (h * group + g) * KEYS);
            }
            prefetch_all(vs, KEYS, h * bytes, bytes); /* V is read next */
        }
        for (int64_t g = 0; g < all; g++) {
            soften(begin, end, scale, cap, scores + g * KEYS, exponents + g, sums + g, out + g * width, width, 1);
            pair_up(scores + g * KEYS, KEYS, weights + g * (KEYS / 2));
        }
        for (int64_t h = 0; h < heads; h++) {
            lay_out_values(vs, h * dim, dim, pairs, then, laid); /* and prefetch the next K */
            for (int64_t g = h * group; g < (h + 1) * group; g += TILE_ROWS) {
                int64_t count = (h + 1) * group - g < TILE_ROWS ? (h + 1) * group - g : TILE_ROWS;
                for (int64_t s = 0; s < slabs; s++) {
                    tiles_block(TILE_ROWS, pairs, weights + g * (KEYS / 2), KEYS / 2, laid + s * (KEYS / 2) * NR, NULL, NULL, 0, made, NR);
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t j = 0; j < NR && s * NR + j < width; j += VL)
                            add_wide(out + (g + i) * width + s * NR + j, *(vec *)(made + i * NR + j));
                }
            }
        }
    }
}
#endif
