/* CPU kernels: products with packed weights (float32, and bfloat16: bfloat16.c), norms, rotary positions, KV pages in
 * float32 or bfloat16, paged attention. Activations are float32.
 *
 * Plain C with vector extensions and OpenMP, compiled once on the machine that runs it (build.py) and called through
 * ctypes (bindings.py). Every function runs on up to `threads` threads (threads.c); all loops are dynamic. A row's result
 * does not depend on the other rows: products sum over k in one order, and attention is split at fixed positions, so
 * the sampled tokens are the same in any batch.
 *
 *     packed weight [out, in]  ->  panels [ceil(out / NR)][in][NR], zeros after the last output; read once, front to
 *                                  back, per MR rows
 *     page pool                ->  token t of a page at page * page_stride + t * kv_heads * dim, K and V in two pools
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

/* VL floats per vector, NV vectors per panel, MR rows at a time: MR * NV accumulators, NV weights and one broadcast
 * value fill the registers. */
#if defined(__AVX512F__)
#define VL 16
#define NV 2
#define MR 12
#elif defined(__AVX2__)
#define VL 8
#define NV 2
#define MR 6
#else
#define VL 4
#define NV 4
#define MR 4
#endif
#define NR (VL * NV)

#define ALIGNED __attribute__((aligned(64)))
#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4), aligned(4)));

/* a * b + c with one rounding where the processor has FMA. Used for an unrolled number of sums: there the compiler
 * would choose between one and two roundings by that number, and a row's result would depend on the other rows. */
INLINE vec fused(vec a, vec b, vec c)
{
#if defined(__FMA__) && VL == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && VL == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__) && VL == 4
    return (vec)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* The sum of a vector by pairwise halving: a fixed order with a short dependency chain. */
#if VL == 16
#define SWAP(v, w) __builtin_shufflevector(v, v, 0 ^ w, 1 ^ w, 2 ^ w, 3 ^ w, 4 ^ w, 5 ^ w, 6 ^ w, 7 ^ w, 8 ^ w, 9 ^ w, 10 ^ w, 11 ^ w, \
                                           12 ^ w, 13 ^ w, 14 ^ w, 15 ^ w)
#elif VL == 8
#define SWAP(v, w) __builtin_shufflevector(v, v, 0 ^ w, 1 ^ w, 2 ^ w, 3 ^ w, 4 ^ w, 5 ^ w, 6 ^ w, 7 ^ w)
#else
#define SWAP(v, w) __builtin_shufflevector(v, v, 0 ^ w, 1 ^ w, 2 ^ w, 3 ^ w)
#endif

INLINE float sum_of(vec v)
{
#if VL >= 16
    v += SWAP(v, 8);
#endif
#if VL >= 8
    v += SWAP(v, 4);
#endif
    v += SWAP(v, 2);
    v += SWAP(v, 1);
    return v[0];
}

typedef uint32_t uvec __attribute__((vector_size(VL * 4), aligned(4)));

/* Lane i of the first of two rows 2^k apart where bit w of i is clear, else lane i - w of the second; and the others. */
#define NEAR(i, w) ((i) & (w) ? VL + (i) - (w) : (i))
#define FAR(i, w) ((i) & (w) ? VL + (i) : (i) + (w))
#if VL == 16
#define LANES(f, w) f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w), f(8, w), f(9, w), f(10, w), f(11, w), \
                    f(12, w), f(13, w), f(14, w), f(15, w)
#elif VL == 8
#define LANES(f, w) f(0, w), f(1, w), f(2, w), f(3, w), f(4, w), f(5, w), f(6, w), f(7, w)
#else
#define LANES(f, w) f(0, w), f(1, w), f(2, w), f(3, w)
#endif
#define EXCHANGE(w) \
    _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++) \
        if (!(i & (w))) { \
            uvec a = r[i], b = r[i + (w)]; \
            r[i] = __builtin_shufflevector(a, b, LANES(NEAR, w)); \
            r[i + (w)] = __builtin_shufflevector(a, b, LANES(FAR, w)); \
        }

/* Transpose VL vectors of VL lanes, in place. */
INLINE void transpose(uvec *r)
{
#if VL >= 16
    EXCHANGE(8)
#endif
#if VL >= 8
    EXCHANGE(4)
#endif
    EXCHANGE(2)
    EXCHANGE(1)
}

/* From PACK_ROWS rows on, x is first laid out for the tiles, in chunks of PACK_BYTES that fit the L2 cache. */
#define PACK_ROWS 96
#define PACK_BYTES (256 << 10)
/* Prefetch distance of weights, in floats. */
#define AHEAD 2048
/* Attention over more than SPLIT keys is split into parts of SPLIT keys, and softmax is updated after every KEYS keys:
 * at multiples of both, in decode steps and in chunks of a prompt. */
#define SPLIT 512
#define KEYS 64
/* Up to FEW rows are multiplied with a weight as it is stored while it is read. */
#define FEW 4
/* Bytes of a virtual memory page. */
#define PAGE 4096

/* Threads take `n` iterations dynamically, an eighth of an equal share at a time, so that a thread that is descheduled
 * does not delay the end much. */
#define SHARE(n) ((n) / (8 * threads) > 0 ? (n) / (8 * threads) : 1)

#if defined(OWN_THREADS)
#include "threads.c"
#endif
#include "bfloat16.c"
#include "amx.c"

struct part {
    const void *weight; /* packed */
    const float *bias;  /* [n] or NULL */
    int64_t n;
    int64_t narrow; /* bfloat16; the same for all parts of a call */
};

int64_t zoo_panel(void) { return NR; }

/* ---------------------------------------------------------------------------------------------------------------- products */

void zoo_pack(const float *w, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, float *out, int threads)
{
    int64_t panels = (n + NR - 1) / NR;
#pragma omp parallel for schedule(dynamic, SHARE(panels)) num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < NR; j++) {
                int64_t o = p * NR + j;
                out[(p * k + i) * NR + j] = o < n ? w[o * stride_n + i * stride_k] : 0.0f;
            }
}

void zoo_unpack(const float *packed, int64_t n, int64_t k, float *out, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(n)) num_threads(threads)
    for (int64_t o = 0; o < n; o++)
        for (int64_t i = 0; i < k; i++) out[o * k + i] = packed[((o / NR) * k + i) * NR + o % NR];
}

/* m rows times one panel. Element p of row i is x[i * step + p * next]: rows as stored (k, 1) or laid out (1, MR).
 * Meanwhile `pace` floats from `fetch` on are prefetched for every element of k. */
INLINE void tile(int m, int64_t k, const float *restrict x, int64_t step, int64_t next, const float *restrict w, const float *fetch, int64_t pace,
                 float *restrict out, int64_t across)
{
    vec acc[MR][NV];
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NV; j++) acc[i][j] = (vec){0};
    for (int64_t p = 0; p < k; p++) {
        vec b[NV];
        for (int j = 0; j < NV; j++) b[j] = *(const vec *)(w + p * NR + j * VL);
        for (int j = 0; j < pace; j += 16) __builtin_prefetch(fetch + p * pace + j);
        for (int i = 0; i < m; i++) {
            vec s = (vec){0} + x[i * step + p * next];
            for (int j = 0; j < NV; j++) acc[i][j] = fused(b[j], s, acc[i][j]);
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < NV; j++) *(vec *)(out + i * across + j * VL) = acc[i][j];
}

#define ROWS(m) \
    case m: \
        if (fetch == NULL) \
            tile(m, k, x, step, 1, w, w + AHEAD, NR, out, across); \
        else \
            tile(m, k, x, step, 1, w, fetch, NR / 2, out, across); \
        break;
/* m rows of x, `step` floats apart, to rows of out, `across` floats apart. */
static void rows_tile(int64_t m, int64_t k, int64_t step, const float *x, const float *w, const float *fetch, float *out, int64_t across)
{
    switch (m) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if MR > 4
        ROWS(5) ROWS(6)
#endif
#if MR > 6
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}

static void laid_tile(int64_t k, const float *x, const float *w, float *out) { tile(MR, k, x, 1, MR, w, w + AHEAD, NR, out, NR); }

typedef float four __attribute__((vector_size(16), aligned(4)));

/* Transpose four values of each of four rows into four columns, `stride` floats apart. */
INLINE void turn(const float *a, const float *b, const float *c, const float *d, float *out, int64_t stride)
{
    four ra = *(const four *)a, rb = *(const four *)b, rc = *(const four *)c, rd = *(const four *)d;
    four low_ab = __builtin_shufflevector(ra, rb, 0, 4, 1, 5), low_cd = __builtin_shufflevector(rc, rd, 0, 4, 1, 5);
    four high_ab = __builtin_shufflevector(ra, rb, 2, 6, 3, 7), high_cd = __builtin_shufflevector(rc, rd, 2, 6, 3, 7);
    *(four *)out = __builtin_shufflevector(low_ab, low_cd, 0, 1, 4, 5);
    *(four *)(out + stride) = __builtin_shufflevector(low_ab, low_cd, 2, 3, 6, 7);
    *(four *)(out + 2 * stride) = __builtin_shufflevector(high_ab, high_cd, 0, 1, 4, 5);
    *(four *)(out + 3 * stride) = __builtin_shufflevector(high_ab, high_cd, 2, 3, 6, 7);
}

/* Lay out blocks [from, end) of x [rows, k] as [blocks][k][MR], zeros after the last row. Called in a parallel region;
 * all its threads wait at the end. */
static void lay_out(const float *x, int64_t rows, int64_t k, int64_t from, int64_t end, float *out)
{
#pragma omp for schedule(dynamic, 1)
    for (int64_t b = from; b < end; b++)
        for (int64_t i = 0; i < MR;) { /* few rows at a time: more would evict each other from the cache */
            const float *row = x + (b * MR + i) * k;
            float *o = out + (b - from) * k * MR + i;
            int64_t p = 0, quick = i + 4 <= MR && b * MR + i + 4 <= rows;
            for (; quick && p + 4 <= k; p += 4) turn(row + p, row + k + p, row + 2 * k + p, row + 3 * k + p, o + p * MR, MR);
            for (; p < k; p++)
                for (int64_t j = 0; j < (quick ? 4 : 1); j++) o[p * MR + j] = b * MR + i + j < rows ? row[j * k + p] : 0.0f;
            i += quick ? 4 : 1;
        }
}

/* a where the mask is set, else b. */
INLINE vec pick(ivec mask, vec a, vec b)
{
    return (vec)(((ivec)a & mask) | ((ivec)b & ~mask));
}

/* exp(x) for x <= 0, to about one unit in the last place: 2^n * e^r with |r| <= ln 2 / 2 (Cephes). Below -87, and for NaN, it is 0. */
INLINE vec exp_of(vec x)
{
    const float magic = 12582912.0f; /* adding and subtracting it rounds to an integer */
    ivec kept = (ivec)(x > -87.0f);
    x = pick(kept, x, (vec){0});
    const vec zero = {0};
    vec n = fused(x, zero + 1.44269504088896341f, zero + magic) - magic;
    x = fused(n, zero - 0.693359375f, x);
    x = fused(n, zero + 2.12194440e-4f, x);
    vec y = fused(x, zero + 1.9875691500e-4f, zero + 1.3981999507e-3f);
    y = fused(y, x, zero + 8.3334519073e-3f);
    y = fused(y, x, zero + 4.1665795894e-2f);
    y = fused(y, x, zero + 1.6666665459e-1f);
    y = fused(y, x, zero + 5.0000001201e-1f);
    y = fused(y * x, x, x) + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return pick(kept, y * (vec)power, (vec){0});
}

/* silu(g) = g / (1 + exp(-g)), computed with exp of non-positive values only. */
INLINE vec silu(vec g)
{
    ivec negative = (ivec)(g < 0.0f);
    vec e = exp_of(pick(negative, g, -g));
    return g * pick(negative, e, (vec){0} + 1.0f) / (1.0f + e);
}

enum { PLAIN = 0, GATED_SILU = 1, ROUNDED = 2 };

#include "bfloat16_product.c"
#include "peaks.c"

/* x [rows, k] times `count` weights side by side -> out [rows, sum of n], plus `add` [rows, sum of n] if not NULL.
 * `how` GATED_SILU: two weights of one size, out [rows, n] = silu(x W0) * (x W1). ROUNDED: out is rounded to bfloat16.
 * Returns 0, or 1 if out of memory. */
int zoo_linear(const float *x, int64_t rows, int64_t k, const struct part *parts, int count, int how, const float *add, float *out,
                int threads)
{
    if (parts[0].narrow) return linear_narrow(x, rows, k, parts, count, how, add, out, threads);
    int64_t total = 0, panels = 0, blocks = (rows + MR - 1) / MR;
    int used = how == GATED_SILU ? 1 : count;
    for (int c = 0; c < used; c++) {
        total += parts[c].n;
        panels += (parts[c].n + NR - 1) / NR;
    }
    float *laid = NULL; /* two chunks of blocks: one is laid out while other threads may still read the preceding one */
    int64_t chunk = PACK_BYTES / (MR * k * 4) + 1;
    if (rows >= PACK_ROWS) laid = aligned_alloc(64, (size_t)((2 * chunk * MR * k * 4 + 63) / 64 * 64));
    if (laid == NULL) chunk = blocks;
#pragma omp parallel num_threads(threads)
    {
        float buffer[2][MR * NR] ALIGNED;
        for (int64_t from = 0; from < blocks; from += chunk) {
            int64_t end = from + chunk < blocks ? from + chunk : blocks;
            float *here = laid == NULL ? NULL : laid + from / chunk % 2 * chunk * MR * k;
            if (here != NULL) lay_out(x, rows, k, from, end, here);
#pragma omp for schedule(dynamic, SHARE(panels)) nowait
            for (int64_t panel = 0; panel < panels; panel++) {
                int which = 0;
                int64_t p = panel, left = 0;
                while (p >= (parts[which].n + NR - 1) / NR) {
                    p -= (parts[which].n + NR - 1) / NR;
                    left += parts[which].n;
                    which++;
                }
                const struct part *part = &parts[which];
                int64_t width = part->n - p * NR < NR ? part->n - p * NR : NR;
                for (int64_t b = from; b < end; b++) {
                    int64_t lo = laid != NULL ? b * MR : rows * b / blocks;
                    int64_t hi = laid == NULL ? rows * (b + 1) / blocks : (lo + MR < rows ? lo + MR : rows);
                    for (int64_t i = lo; i < hi; i++) /* prefetch the output: it is not in the cache */
                        for (int64_t j = 0; j < width; j += 16) {
                            __builtin_prefetch(out + i * total + left + p * NR + j, 1);
                            if (add != NULL) __builtin_prefetch(add + i * total + left + p * NR + j);
                        }
                    for (int g = 0; g < (how == GATED_SILU ? 2 : 1); g++) {
                        const float *w = (const float *)parts[which + g].weight + p * k * NR;
                        if (laid != NULL)
                            laid_tile(k, here + (b - from) * k * MR, w, buffer[g]);
                        else
                            rows_tile(hi - lo, k, k, x + lo * k, w, b == from ? NULL : w + k * NR, buffer[g], NR);
                        const float *bias = parts[which + g].bias;
                        if (bias != NULL)
                            for (int64_t i = 0; i < hi - lo; i++)
                                for (int64_t j = 0; j < width; j++) buffer[g][i * NR + j] += bias[p * NR + j];
                    }
                    for (int64_t i = 0; i < hi - lo; i++) {
                        float *s = buffer[0] + i * NR;
                        if (how == GATED_SILU)
                            for (int64_t j = 0; j < NR; j += VL) *(vec *)(s + j) = silu(*(vec *)(s + j)) * *(vec *)(buffer[1] + i * NR + j);
                        int64_t at = (lo + i) * total + left + p * NR;
                        if (add != NULL)
                            for (int64_t j = 0; j < width; j++) out[at + j] = add[at + j] + s[j];
                        else
                            memcpy(out + at, s, (size_t)width * 4);
                    }
                }
            }
        }
    }
    free(laid);
    return 0;
}

/* Read units [p, p + VL) of VL rows of a weight as it is stored, `apart` bytes apart, and transpose them: a unit is a float
 * or a pair of bfloat16. Only `count` rows exist, and `bytes` of each. Prefetches as much from `fetch` on. */
INLINE void turn_rows(const char *w, int64_t apart, int64_t count, int64_t bytes, int64_t p, const char *fetch, uvec *r)
{
    if (count >= VL && (p + VL) * 4 <= bytes) {
        for (int i = 0; i < VL; i++) {
            __builtin_prefetch(fetch + i * VL * 4, 0, 2); /* into L2: a panel is larger than L1 */
            r[i] = *(const uvec *)(w + i * apart + p * 4);
        }
    } else {
        int64_t rest = bytes - p * 4 < VL * 4 ? bytes - p * 4 : VL * 4;
        for (int i = 0; i < VL; i++) {
            r[i] = (uvec){0};
            if (i < count) memcpy(&r[i], w + i * apart + p * 4, (size_t)rest);
        }
    }
    transpose(r);
}

/* Lay out NR rows of a weight as one panel of a packed weight: [units][NR]. Arguments as for turn_rows. */
static void lay_out_panel(const char *w, int64_t apart, int64_t count, int64_t bytes, const char *fetch, uint32_t *out)
{
    int64_t units = (bytes + 3) / 4;
    for (int64_t at = 0; at < NR; at += VL)
        for (int64_t p = 0; p < units; p += VL, fetch += VL * VL * 4) {
            uvec r[VL];
            turn_rows(w + at * apart, apart, count - at, bytes, p, fetch, r);
            for (int i = 0; i < VL; i++)
                if (p + i < units) *(uvec *)(out + (p + i) * NR + at) = r[i];
        }
}

/* m rows of x [m, units] times VL rows of a weight as it is stored -> out [m, NR]: as lay_out_panel and a tile of the
 * packed weight, in registers. */
INLINE void stored_tile(int m, const uint32_t *x, const char *w, int64_t apart, int64_t count, int64_t bytes, int narrow, const char *fetch,
                        float *out)
{
    int64_t units = (bytes + 3) / 4;
    vec acc[FEW];
    for (int i = 0; i < m; i++) acc[i] = (vec){0};
    for (int64_t p = 0; p < units; p += VL, fetch += VL * VL * 4) {
        uvec r[VL];
        turn_rows(w, apart, count, bytes, p, fetch, r);
        int64_t left = units - p < VL ? units - p : VL;
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++) {
            if (j >= left) break;
            for (int i = 0; i < m; i++) {
                uvec s = (uvec){0} + x[i * units + p + j];
                acc[i] = narrow ? dot_pairs(acc[i], r[j], s) : fused((vec)r[j], (vec)s, acc[i]);
            }
        }
    }
    for (int i = 0; i < m; i++) *(vec *)(out + i * NR) = acc[i];
}

#define STORED(m) \
    case m: \
        if (narrow) \
            stored_tile(m, x, w, apart, count, bytes, 1, fetch, out); \
        else \
            stored_tile(m, x, w, apart, count, bytes, 0, fetch, out); \
        break;
static void few_stored(int64_t m, const uint32_t *x, const char *w, int64_t apart, int64_t count, int64_t bytes, int64_t narrow, const char *fetch,
                       float *out)
{
    switch (m) {
        STORED(1) STORED(2) STORED(3) STORED(4)
    }
}

/* x [rows, k] times a weight [n, k] as it is stored, rows `apart` values apart -> out [rows, n]; bias [n] or NULL.
 * narrow: the weight is bfloat16. Each panel is laid out on the fly, so a row's sums have the order, and the bits, of
 * zoo_linear. Returns 0, or 1 if out of memory. */
int zoo_stored(const float *x, int64_t rows, int64_t k, const char *w, int64_t apart, int64_t narrow, const float *bias, int64_t n,
               float *out, int threads)
{
    int64_t panels = (n + NR - 1) / NR, blocks = (rows + MR - 1) / MR, size = narrow ? 2 : 4, units = narrow ? (k + 1) / 2 : k;
    if (narrow && on_tiles()) return stored_on_tiles(x, rows, k, (const uint16_t *)w, apart, bias, n, out, threads);
    uint32_t *paired = NULL; /* x rounded to bfloat16 */
    if (narrow) {
        paired = aligned_alloc(64, (size_t)((rows * units * 4 + 63) / 64 * 64));
        if (paired == NULL) return 1;
    }
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float buffer[MR * NR] ALIGNED;
        uint32_t *panel = aligned_alloc(64, (size_t)((units * NR * 4 + 63) / 64 * 64));
        if (panel == NULL) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        if (narrow) {
#pragma omp for schedule(dynamic, SHARE(rows))
            for (int64_t r = 0; r < rows; r++) pair_up(x + r * k, k, paired + r * units);
        }
#pragma omp for schedule(dynamic, SHARE(panels))
        for (int64_t p = 0; p < panels; p++) {
            if (panel == NULL) continue;
            const char *from = w + p * NR * apart * size, *coming = from + (p + 1 < panels ? NR * apart * size : 0);
            int64_t width = n - p * NR < NR ? n - p * NR : NR;
            if (rows > FEW) lay_out_panel(from, apart * size, width, k * size, coming, panel);
            for (int64_t b = 0; b < blocks; b++) {
                int64_t lo = rows * b / blocks, hi = rows * (b + 1) / blocks;
                if (rows <= FEW)
                    for (int64_t at = 0; at < NR; at += VL)
                        few_stored(rows, narrow ? paired : (const uint32_t *)x, from + at * apart * size, apart * size, width - at, k * size,
                                   narrow, coming + at * k * size, buffer + at);
                else if (narrow)
                    rows_tile_narrow(hi - lo, units, paired + lo * units, panel, panel, buffer);
                else
                    rows_tile(hi - lo, k, k, x + lo * k, (const float *)panel, (const float *)panel, buffer, NR);
                for (int64_t i = 0; i < hi - lo; i++)
                    for (int64_t j = 0; j < width; j++)
                        out[(lo + i) * n + p * NR + j] = buffer[i * NR + j] + (bias == NULL ? 0.0f : bias[p * NR + j]);
            }
        }
        free(panel);
    }
    free(paired);
    return failed;
}

/* both [rows, 2 n], gate and up side by side -> out [rows, n] = silu(gate) * up: for products with adapters. */
void zoo_gate(const float *both, int64_t rows, int64_t n, float *out, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(rows)) num_threads(threads) if (rows * n > 8192)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = both + 2 * r * n, *through = gate + n;
        float *o = out + r * n;
        int64_t i = 0;
        for (; i + VL <= n; i += VL) *(vec *)(o + i) = silu(*(const vec *)(gate + i)) * *(const vec *)(through + i);
        if (i < n) {
            vec last = {0};
            memcpy(&last, gate + i, (size_t)(n - i) * 4);
            last = silu(last);
            for (int64_t j = 0; i + j < n; j++) o[i + j] = last[j] * through[i + j];
        }
    }
}

/* ---------------------------------------------------------------------------------------------------------------- adapters */

#define MOST_PARTS 4

/* One adapter on a group of weights that read the same x: its A's side by side, packed as one weight [ranks, k], and
 * its B's [n, rank], packed one by one. rank is 0 for a part without the adapter, ranks is 0 for a group without it. */
struct low {
    const float *a;
    int64_t ranks;
    const float *b[MOST_PARTS];
    const float *bias[MOST_PARTS];
    int64_t rank[MOST_PARTS];
};

/* out[lo:hi] += (x[lo:hi] A^T) B^T for each of `count` adapters, on its own rows only. bounds: lo, hi of each; x [rows,
 * k]; out [rows, sum of n]. Returns 0, or 1 if out of memory. */
int zoo_adapt(const float *x, int64_t k, const struct low *lows, const int64_t *bounds, int64_t count, const int64_t *n, int parts,
               float *out, int threads)
{
    int64_t total = 0, items = 0, widest = 0;
    for (int c = 0; c < parts; c++) total += n[c];
    for (int64_t s = 0; s < count; s++)
        if (lows[s].ranks > 0) {
            items += (bounds[2 * s + 1] - bounds[2 * s] + MR - 1) / MR;
            if (lows[s].ranks > widest) widest = lows[s].ranks;
        }
    float *lows_of = malloc((size_t)(items * MR * widest) * 4 + 4);
    if (lows_of == NULL) return 1;
#pragma omp parallel num_threads(threads) if (items > 1)
    {
        float buffer[MR * NR] ALIGNED;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; item++) {
            int64_t s = 0, block = item;
            for (;; s++) {
                if (lows[s].ranks == 0) continue;
                int64_t own = (bounds[2 * s + 1] - bounds[2 * s] + MR - 1) / MR;
                if (block < own) break;
                block -= own;
            }
            const struct low *which = &lows[s];
            float *low = lows_of + item * MR * widest;
            int64_t lo = bounds[2 * s] + block * MR, ranks = which->ranks;
            int64_t m = bounds[2 * s + 1] - lo < MR ? bounds[2 * s + 1] - lo : MR;
            for (int64_t p = 0; p * NR < ranks; p++) {
                int64_t width = ranks - p * NR < NR ? ranks - p * NR : NR;
                rows_tile(m, k, k, x + lo * k, which->a + p * k * NR, NULL, buffer, NR);
                for (int64_t i = 0; i < m; i++) memcpy(low + i * ranks + p * NR, buffer + i * NR, (size_t)width * 4);
            }
            int64_t left = 0, from = 0;
            for (int c = 0; c < parts; left += n[c], from += which->rank[c], c++) {
                if (which->rank[c] == 0) continue;
                for (int64_t p = 0; p * NR < n[c]; p++) {
                    int64_t width = n[c] - p * NR < NR ? n[c] - p * NR : NR;
                    rows_tile(m, which->rank[c], ranks, low + from, which->b[c] + p * which->rank[c] * NR, NULL, buffer, NR);
                    const float *bias = which->bias[c];
                    for (int64_t i = 0; i < m; i++) {
                        float *o = out + (lo + i) * total + left + p * NR;
                        for (int64_t j = 0; j < width; j++) o[j] += buffer[i * NR + j] + (bias == NULL ? 0.0f : bias[p * NR + j]);
                    }
                }
            }
        }
    }
    free(lows_of);
    return 0;
}

/* ------------------------------------------------------------------------------- norms, rotary positions, KV pages */

/* RMSNorm of `inner` adjacent vectors of `width` in each of `rows` rows of x, `stride` apart, to the same places of
 * out, rows `out_stride` apart. `weight` [width]. */
void zoo_norm(const float *x, int64_t rows, int64_t inner, int64_t width, int64_t stride, const float *weight, float eps, float *out,
              int64_t out_stride, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(rows * inner)) num_threads(threads) if (rows * inner * width > 4096)
    for (int64_t each = 0; each < rows * inner; each++) {
        int64_t row = each / inner, at = each % inner * width;
        const float *in = x + row * stride + at;
        float *o = out + row * out_stride + at;
        vec sums = {0};
        float sum = 0.0f;
        int64_t i = 0;
        for (; i + VL <= width; i += VL) sums += *(const vec *)(in + i) * *(const vec *)(in + i);
        for (; i < width; i++) sum += in[i] * in[i];
        sum += sum_of(sums);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (i = 0; i + VL <= width; i += VL) *(vec *)(o + i) = *(const vec *)(in + i) * scale * *(const vec *)(weight + i);
        for (; i < width; i++) o[i] = in[i] * scale * weight[i];
    }
}

/* Rotary positions in place on the first `heads` heads of each token of x, pairing the two halves of a head.
 * cosine, sine [tokens, dim]. */
void zoo_rotate(float *x, int64_t tokens, int64_t stride, int64_t heads, int64_t dim, const float *cosine, const float *sine, int threads)
{
    int64_t half = dim / 2;
#pragma omp parallel for schedule(dynamic, SHARE(tokens)) num_threads(threads) if (tokens * heads * dim > 8192)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            float *restrict a = x + t * stride + h * dim, *restrict b = a + half;
            const float *c = cosine + t * dim, *s = sine + t * dim;
            for (int64_t i = 0; i < half; i++) {
                float first = a[i], second = b[i];
                a[i] = first * c[i] - second * s[i];
                b[i] = second * c[half + i] + first * s[half + i];
            }
        }
}

/* Write one token's values to a pool: floats as they are (size 4), bfloat16 as it is (size 2), or floats as bfloat16. */
INLINE void put(const void *from, void *to, int64_t width, int64_t size, int narrowed)
{
    if (!narrowed) {
        memcpy(to, from, (size_t)(width * size));
        return;
    }
    for (int64_t i = 0; i < width; i++) ((uint16_t *)to)[i] = (uint16_t)narrow_of(((const float *)from)[i]);
}

/* Write K and V of tokens [tokens, width] to (pages[i], offsets[i]) of the pools. Strides are in values: `k_stride` and
 * `v_stride` from token to token, `page_stride` from page to page. `size`: bytes of a pool's value. `narrowed`: K and V
 * are float32 and are rounded to the pools' bfloat16. */
void zoo_keep(const void *k, const void *v, int64_t k_stride, int64_t v_stride, int64_t tokens, int64_t width, void *k_pool,
              void *v_pool, int64_t page_stride, const int64_t *pages, const int64_t *offsets, int64_t size, int narrowed, int threads)
{
    int64_t from = narrowed ? 4 : size;
#pragma omp parallel for schedule(dynamic, SHARE(tokens)) num_threads(threads) if (tokens * width > 16384)
    for (int64_t t = 0; t < tokens; t++) {
        int64_t at = (pages[t] * page_stride + offsets[t] * width) * size;
        put((const char *)k + t * k_stride * from, (char *)k_pool + at, width, size, narrowed);
        put((const char *)v + t * v_stride * from, (char *)v_pool + at, width, size, narrowed);
    }
}

/* --------------------------------------------------------------------------------------------------------------- attention */

struct pages {
    const char *k, *v;       /* pools of float32, or of bfloat16 if `narrow` */
    int64_t page_stride;     /* values from page to page */
    int64_t page_tokens;
    const int64_t *tables;   /* page ids of this layer, `table_stride` apart from row to row */
    int64_t table_stride;
    int64_t narrow;
};

typedef uint16_t hvec __attribute__((vector_size(VL * 2), aligned(2)));

/* Values of K or V as floats. */
INLINE vec load_of(const char *p, int64_t i, int narrow)
{
    if (narrow) return (vec)(__builtin_convertvector(*(const hvec *)(p + i * 2), uvec) << 16);
    return *(const vec *)(p + i * 4);
}

INLINE float value_of(const char *p, int64_t i, int narrow)
{
    return narrow ? wide_of(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

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

/* Scores of m query heads, dim floats apart, against VL keys of one head, at `offset` bytes of ks (NULL: any score):
 * scores[i * KEYS]. Sums over dim in the order of `tile`. Prefetches what is at the same offset of `then`. */
INLINE void score_tile(int m, int64_t dim, const float *q, const char **ks, const char **then, int64_t offset, int narrow, float *scores)
{
    vec acc[8];
    int64_t units = narrow ? (dim + 1) / 2 : dim;
    for (int i = 0; i < m; i++) acc[i] = (vec){0};
    for (int64_t p = 0; p < units; p += VL) {
        uvec r[VL];
        int64_t bytes = dim * (narrow ? 2 : 4) - p * 4;
        for (int i = 0; i < VL; i++) {
            r[i] = (uvec){0};
            if (ks[i] == NULL) continue;
            if (bytes >= VL * 4)
                r[i] = *(const uvec *)(ks[i] + offset + p * 4);
            else
                memcpy(&r[i], ks[i] + offset + p * 4, (size_t)bytes);
            if (then != NULL) __builtin_prefetch(then[i] + offset + p * 4, 0, 2);
        }
        transpose(r);
        int64_t left = units - p < VL ? units - p : VL;
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++) {
            if (j >= left) break;
            int64_t d = narrow ? 2 * (p + j) : p + j;
            for (int i = 0; i < m; i++) acc[i] = fused(narrow ? (vec)(r[j] << 16) : (vec)r[j], (vec){0} + q[i * dim + d], acc[i]);
            if (narrow && d + 1 < dim)
                for (int i = 0; i < m; i++) acc[i] = fused((vec)(r[j] & 0xffff0000u), (vec){0} + q[i * dim + d + 1], acc[i]);
        }
    }
    for (int i = 0; i < m; i++) *(vec *)(scores + i * KEYS) = acc[i];
}

#define SCORE(m) \
    case m: \
        if (narrow) \
            score_tile(m, dim, q, ks, then, offset, 1, scores); \
        else \
            score_tile(m, dim, q, ks, then, offset, 0, scores); \
        break;
static void score_keys(int64_t m, int64_t dim, const float *q, const char **ks, const char **then, int64_t offset, int narrow, float *scores)
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
                       int narrow, float *acc, int64_t width)
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
            vec s = (vec){0} + weights[i * KEYS + t];
            for (int j = 0; j < c; j++) made[i][j] = fused(b[j], s, made[i][j]);
        }
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < c; j++) *(vec *)(acc + i * width + j * VL) += made[i][j];
}

/* As value_tile, for one query head and the values from `offset` up to dim, fewer than a vector. */
INLINE void value_rest(int64_t begin, int64_t end, const float *weights, const char **vs, int64_t offset, int64_t rest, int narrow, float *acc)
{
    vec made = {0};
    for (int64_t t = begin; t < end; t++) {
        vec b = {0};
        for (int64_t j = 0; j < rest; j++) b[j] = value_of(vs[t], offset + j, narrow);
        made = fused(b, (vec){0} + weights[t], made);
    }
    *(vec *)acc += made;
}

/* The largest element. */
INLINE float max_of(vec v)
{
#if VL >= 16
    v = pick((ivec)(SWAP(v, 8) > v), SWAP(v, 8), v);
#endif
#if VL >= 8
    v = pick((ivec)(SWAP(v, 4) > v), SWAP(v, 4), v);
#endif
    v = pick((ivec)(SWAP(v, 2) > v), SWAP(v, 2), v);
    v = pick((ivec)(SWAP(v, 1) > v), SWAP(v, 1), v);
    return v[0];
}

/* Update one query head's softmax with `scale` times the scores of KEYS keys, of which [begin, end) count: scores become
 * weights; maximum, sum and acc [width] of the preceding keys are scaled to the new maximum. scale is positive. Decode
 * steps and chunks of a prompt call this one function, so that a token has the same bits in both. */
static __attribute__((noinline)) void soften(int64_t begin, int64_t end, float scale, float cap, float *scores, float *maximum, float *sum,
                                             float *acc, int64_t width)
{
    if (cap > 0.0f) {
        for (int64_t t = begin; t < end; t++) scores[t] = tanhf(scores[t] * scale / cap) * cap;
        scale = 1.0f;
    }
    vec high = (vec){0} - INFINITY;
    if (begin > 0 || end < KEYS) {
        int32_t lanes[VL] ALIGNED;
        for (int t = 0; t < VL; t++) lanes[t] = t;
        for (int t = 0; t < KEYS; t += VL) {
            ivec at = *(ivec *)lanes + t;
            *(vec *)(scores + t) = pick((at < (int32_t)end) & (at >= (int32_t)begin), *(vec *)(scores + t), (vec){0} - INFINITY);
        }
    }
    for (int t = 0; t < KEYS; t += VL) {
        vec s = *(vec *)(scores + t);
        high = pick((ivec)(s > high), s, high);
    }
    float most = max_of(high) * scale;
    if (most > *maximum) {
        float shrink = expf(*maximum - most);
        *sum *= shrink;
        for (int64_t i = 0; i < width; i += VL) *(vec *)(acc + i) *= shrink;
        *maximum = most;
    }
    vec total = {0}, base = (vec){0} - (*maximum == -INFINITY ? 0.0f : *maximum); /* avoids NaN when all are -inf */
    for (int t = 0; t < KEYS; t += VL) {
        vec p = exp_of(fused(*(vec *)(scores + t), (vec){0} + scale, base));
        *(vec *)(scores + t) = p;
        total += p;
    }
    *sum += sum_of(total);
}

/* Add the attention over SPLIT keys to that over the preceding ones: acc [width], maximum and sum of both. One function
 * for decode steps and chunks, as soften. */
static __attribute__((noinline)) void add_split(const float *acc, float maximum, float sum, float *total, float *total_maximum, float *total_sum,
                                                int64_t width)
{
    if (maximum == -INFINITY) return;
    float most = maximum > *total_maximum ? maximum : *total_maximum;
    float kept = expf(*total_maximum - most), added = expf(maximum - most);
    *total_sum = *total_sum * kept + sum * added;
    *total_maximum = most;
    for (int64_t i = 0; i < width; i += VL) *(vec *)(total + i) = fused(*(const vec *)(acc + i), (vec){0} + added, *(vec *)(total + i) * kept);
}

#define VALUES(c) \
    switch (m) { \
        case 4: value_tile(4, c, begin, end, mine, vs, g == h * group ? then : NULL, h * dim + d, narrow, o + d, width); break; \
        case 3: value_tile(3, c, begin, end, mine, vs, g == h * group ? then : NULL, h * dim + d, narrow, o + d, width); break; \
        case 2: value_tile(2, c, begin, end, mine, vs, g == h * group ? then : NULL, h * dim + d, narrow, o + d, width); break; \
        default: value_tile(1, c, begin, end, mine, vs, g == h * group ? then : NULL, h * dim + d, narrow, o + d, width); \
    }
/* Attend with the query heads of KV heads [first, first + heads) over the tokens of one row, at most SPLIT.
 *
 * q [heads * group, dim]; out [heads * group, width], dim rounded up to vectors, is unnormalised, with each query head's
 * maximum and sum: softmax(q K^T) V = out / sum. A token's heads are contiguous and read together. V is prefetched while
 * K is read, and the next K while V is read, at the end that of row `next`, which probably follows: runs as short as a KV
 * page defeat the hardware prefetcher. Scratch: scores [heads * group, KEYS]. */
INLINE void attend_part(int64_t heads, int64_t group, int64_t dim, const float *q, const struct pages *pages, const struct reach *row,
                        const struct reach *next, int64_t first, int64_t kv_heads, int narrow, float scale, float cap, float *scores,
                        float *out, float *maxima, float *sums)
{
    const char *places[2][2][KEYS];
    const int64_t size = narrow ? 2 : 4, width = (dim + VL - 1) / VL * VL;
    int64_t all = heads * group, lo = row->lo, hi = row->hi;
    const int64_t *table = row->table;
    for (int64_t g = 0; g < all; g++) {
        maxima[g] = -INFINITY;
        sums[g] = 0.0f;
    }
    memset(out, 0, (size_t)(all * width) * 4);
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
                    score_keys(group - g < SCORED ? group - g : SCORED, dim, q + (h * group + g) * dim, ks + t, g == 0 ? vs + t : NULL, h * dim * size,
                               narrow, scores + (h * group + g) * KEYS + t);
        for (int64_t g = 0; g < all; g++) soften(begin, end, scale, cap, scores + g * KEYS, maxima + g, sums + g, out + g * width, width);
        for (int64_t h = 0; h < heads; h++) {
            for (int64_t g = h * group; g < (h + 1) * group;) {
                int64_t m = (h + 1) * group - g < 4 ? (h + 1) * group - g : 4, d = 0;
                const float *mine = scores + g * KEYS;
                float *o = out + g * width;
                for (; d + 4 * VL <= dim; d += 4 * VL) VALUES(4);
                for (; d + VL <= dim; d += VL) VALUES(1);
                for (int64_t i = 0; i < m && d < dim; i++)
                    value_rest(begin, end, mine + i * KEYS, vs, h * dim + d, dim - d, narrow, o + i * width + d);
                g += m;
            }
        }
    }
}

#define ATTEND(D) \
    do { \
        if (pages->narrow) \
            attend_part(heads, group, D, q, pages, row, next, first, kv_heads, 1, scale, cap, scores, out, maxima, sums); \
        else \
            attend_part(heads, group, D, q, pages, row, next, first, kv_heads, 0, scale, cap, scores, out, maxima, sums); \
    } while (0)
/* Constant sizes let the compiler unroll. */
static void attend_any(int64_t heads, int64_t group, int64_t dim, const float *q, const struct pages *pages, const struct reach *row,
                       const struct reach *next, int64_t first, int64_t kv_heads, float scale, float cap, float *scores,
                       float *out, float *maxima, float *sums)
{
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
 * the last `window` tokens only, 0 for all. cap: soft cap, 0 for none. Returns 0, or 1 if out of memory. */
int zoo_decode(const float *q, int64_t q_stride, const int64_t *tokens, const int64_t *rows_of, const int64_t *lengths, int64_t rows,
               int64_t heads, int64_t kv_heads, int64_t dim, const struct pages *pages, int64_t window, float scale, float cap,
               float *out, int threads)
{
    int64_t group = heads / kv_heads, longest = 0;
    for (int64_t r = 0; r < rows; r++) longest = lengths[r] > longest ? lengths[r] : longest;
    int64_t splits = (longest + SPLIT - 1) / SPLIT;
    int64_t at_once = rows * splits >= 2 * threads ? kv_heads : 1; /* with few rows, threads share a row's heads */
    int64_t shares = kv_heads / at_once, padded = (dim + VL - 1) / VL * VL, width = heads * (padded + 2);
    float *parts = malloc((size_t)(rows * splits * width) * 4); /* [rows, splits]: out [heads, padded], maxima, sums [heads] */
    if (parts == NULL) return 1;
#pragma omp parallel num_threads(threads)
    {
        float scores[at_once * group * KEYS] ALIGNED, total[padded] ALIGNED;
#pragma omp for schedule(dynamic, 1)
        for (int64_t each = 0; each < rows * splits * shares; each++) {
            int64_t r = each / shares / splits, split = each / shares % splits, head = each % shares * at_once;
            int64_t later = each / shares / splits + threads;
            struct reach row = reach_of(pages, rows_of, lengths, r, split, window), next = row;
            next.hi = next.lo;
            if (at_once == kv_heads && splits == 1 && later < rows) next = reach_of(pages, rows_of, lengths, later, 0, window);
            float *o = parts + each / shares * width, *maxima = o + heads * padded + head * group, *sums = maxima + heads;
            if (row.lo >= row.hi) {
                for (int64_t g = 0; g < at_once * group; g++) maxima[g] = -INFINITY;
                continue;
            }
            const float *mine = q + (tokens == NULL ? r : tokens[r]) * q_stride + head * group * dim;
            attend_any(at_once, group, dim, mine, pages, &row, &next, head, kv_heads, scale, cap, scores,
                       o + head * group * padded, maxima, sums);
        }
#pragma omp for schedule(dynamic, SHARE(rows * heads))
        for (int64_t each = 0; each < rows * heads; each++) {
            int64_t r = each / heads, head = each % heads;
            float *o = out + ((tokens == NULL ? r : tokens[r]) * heads + head) * dim;
            const float *part = parts + r * splits * width;
            float most = -INFINITY, sum = 0.0f;
            memset(total, 0, (size_t)padded * 4);
            for (int64_t s = 0; s < splits; s++, part += width)
                add_split(part + head * padded, part[heads * padded + head], part[heads * (padded + 1) + head], total, &most, &sum, padded);
            for (int64_t j = 0; j < dim; j++) o[j] = total[j] * (sum > 0.0f ? 1.0f / sum : 0.0f);
        }
    }
    free(parts);
    return 0;
}

/* A chunk of a prompt: consecutive tokens of one row, each attending to the row's tokens up to itself. */
struct chunk {
    int64_t token; /* index of the first one in q and out */
    int64_t count;
    int64_t start; /* its position: the number of the row's tokens before it */
    int64_t row;   /* in the tables */
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

/* Panels of keys per softmax update. */
#define PANELS (KEYS / NR)

/* Attend with a block of m query rows of one head, the first at position `first`, over the laid out K and V of their
 * row. acc: scratch for MR rows of twice the padded width and of dim. */
static void attend_block(int64_t m, int64_t dim, const float *q, int64_t q_stride, const float *k, const float *v, int64_t padded,
                         int64_t first, int64_t window, float scale, float cap, float *acc, float *out, int64_t out_stride)
{
    float scores[MR * KEYS] ALIGNED, made[MR * NR] ALIGNED, maxima[MR], sums[MR], total_maxima[MR], total_sums[MR];
    int64_t slabs = (dim + NR - 1) / NR, width = slabs * NR, end = (first + m + NR - 1) / NR;
    float *total = acc + MR * width, *mine = total + MR * width; /* copied, because rows a page apart would evict each other */
    for (int64_t i = 0; i < m; i++) {
        maxima[i] = total_maxima[i] = -INFINITY, sums[i] = total_sums[i] = 0.0f;
        memcpy(mine + i * dim, q + i * q_stride, (size_t)dim * 4);
    }
    memset(acc, 0, (size_t)(m * width) * 4);
    memset(total, 0, (size_t)(m * width) * 4);
    int64_t lo = window > 0 && first + 1 > window ? (first + 1 - window) / KEYS * PANELS : 0;
    for (int64_t panel = lo; panel < end; panel += PANELS) {
        int64_t count = end - panel < PANELS ? end - panel : PANELS;
        for (int64_t p = 0; p < count; p++) rows_tile(m, dim, dim, mine, k + (panel + p) * dim * NR, NULL, scores + p * NR, KEYS);
        for (int64_t i = 0; i < m; i++) {
            int64_t after = first + i + 1 - panel * NR, before = window > 0 ? after - window : 0;
            after = after < 0 ? 0 : after < KEYS ? after : KEYS;
            before = before < 0 ? 0 : before < KEYS ? before : KEYS;
            soften(before, after, scale, cap, scores + i * KEYS, maxima + i, sums + i, acc + i * width, width);
        }
        for (int64_t s = 0; s < slabs; s++) {
            rows_tile(m, count * NR, KEYS, scores, v + (s * padded + panel * NR) * NR, NULL, made, NR);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < NR; j += VL) *(vec *)(acc + i * width + s * NR + j) += *(vec *)(made + i * NR + j);
        }
        if ((panel + PANELS) * NR % SPLIT != 0 && panel + PANELS < end) continue;
        for (int64_t i = 0; i < m; i++) {
            add_split(acc + i * width, maxima[i], sums[i], total + i * width, total_maxima + i, total_sums + i, width);
            maxima[i] = -INFINITY, sums[i] = 0.0f;
        }
        memset(acc, 0, (size_t)(m * width) * 4);
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < dim; j++) out[i * out_stride + j] = total[i * width + j] * (total_sums[i] > 0.0f ? 1.0f / total_sums[i] : 0.0f);
}

/* Attend with every chunk's tokens over their rows' pages, which end with these tokens. q: token t at q + t * q_stride,
 * [heads, dim]; out likewise, heads * dim apart. window, scale, cap, result as in zoo_decode. */
int zoo_chunks(const float *q, int64_t q_stride, const struct chunk *chunks, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim,
               const struct pages *pages, int64_t window, float scale, float cap, float *out, int threads)
{
    int64_t group = heads / kv_heads, slabs = (dim + NR - 1) / NR, blocks = 0, room = 0;
    int64_t *offsets = malloc((size_t)(2 * count + 2) * 8), *firsts = offsets + count + 1;
    if (offsets == NULL) return 1;
    for (int64_t c = 0; c < count; c++) { /* offset of each chunk's K and V, and number of its first block */
        offsets[c] = room;
        firsts[c] = blocks;
        room += kv_heads * ((chunks[c].start + chunks[c].count + NR - 1) / NR * NR) * (dim + slabs * NR);
        blocks += (chunks[c].count + MR - 1) / MR * heads;
    }
    float *laid = aligned_alloc(64, (size_t)((room * 4 + 63) / 64 * 64));
    if (laid == NULL) {
        free(offsets);
        return 1;
    }
#pragma omp parallel num_threads(threads)
    {
        float acc[MR * (2 * slabs * NR + dim)] ALIGNED, wide[4 * dim] ALIGNED;
#pragma omp for schedule(dynamic, 1)
        for (int64_t each = 0; each < count * kv_heads; each++) {
            const struct chunk *chunk = &chunks[each / kv_heads];
            int64_t length = chunk->start + chunk->count, padded = (length + NR - 1) / NR * NR, head = each % kv_heads;
            float *k = laid + offsets[each / kv_heads] + head * padded * (dim + slabs * NR);
            lay_out_head(pages, pages->tables + chunk->row * pages->table_stride, head, kv_heads, dim, length, padded, wide, k, k + padded * dim);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t each = blocks - 1; each >= 0; each--) { /* the longest first */
            int64_t c = count - 1;
            while (firsts[c] > each) c--;
            const struct chunk *chunk = &chunks[c];
            int64_t block = (each - firsts[c]) / heads, head = (each - firsts[c]) % heads, lo = block * MR;
            int64_t padded = (chunk->start + chunk->count + NR - 1) / NR * NR, m = chunk->count - lo < MR ? chunk->count - lo : MR;
            const float *k = laid + offsets[c] + head / group * padded * (dim + slabs * NR);
            attend_block(m, dim, q + (chunk->token + lo) * q_stride + head * dim, q_stride, k, k + padded * dim, padded, chunk->start + lo,
                         window, scale, cap, acc, out + ((chunk->token + lo) * heads + head) * dim, heads * dim);
        }
    }
    free(laid);
    free(offsets);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------- whole layers */

enum { ATTENTION = 0, FFN = 1 };

/* One half of a layer: hidden += out(attend(rotate(norm(in(norm(hidden)))))) or hidden += out(silu(gate) * up). */
struct half {
    int64_t kind, width;
    const float *norm;
    const struct part *in, *out; /* q, k, v or gate, up; o or down */
    int64_t in_count, in_total, out_inputs;
    const int64_t *in_sizes, *out_sizes;
    const float *q_norm, *k_norm; /* of each head, or NULL */
    int64_t heads, kv_heads, dim, window, layer;
    const struct low *in_lows, *out_lows; /* adapters, one per pair of bounds, or NULL */
    float eps, q_eps, k_eps, scale;
    int64_t narrow; /* weights are bfloat16, and hidden is rounded to it */
};

/* What the rows of a step have in common; each row is one token. Scratch: normed [rows, width], wide [rows, widest
 * in_total], made [rows, widest out_inputs]. */
struct step {
    int64_t rows;
    const float *cosine, *sine;
    char *k_pool, *v_pool;
    int64_t page_stride, page_tokens;
    const int64_t *token_pages, *token_offsets; /* [layers, rows], [rows] */
    const int64_t *tables;                      /* [rows, layers, groups] by the two strides */
    int64_t table_stride, layer_stride;
    const int64_t *lengths;
    const int64_t *bounds;
    int64_t adapters;
    float *normed, *wide, *made;
    int64_t narrow; /* pools are bfloat16 */
};

/* Run hidden [rows, width] through `count` halves, in place. Returns 0, or 1 if out of memory. */
int zoo_layers(float *hidden, const struct half *halves, int64_t count, const struct step *step, int threads)
{
    int64_t rows = step->rows;
    int failed = 0;
    for (const struct half *half = halves; half < halves + count && !failed; half++) {
        zoo_norm(hidden, rows, 1, half->width, half->width, half->norm, half->eps, step->normed, half->width, threads);
        if (half->kind == FFN && half->in_lows == NULL) {
            failed |= zoo_linear(step->normed, rows, half->width, half->in, 2, GATED_SILU, NULL, step->made, threads);
        } else {
            failed |= zoo_linear(step->normed, rows, half->width, half->in, (int)half->in_count, PLAIN, NULL, step->wide, threads);
            if (half->in_lows != NULL)
                failed |= zoo_adapt(step->normed, half->width, half->in_lows, step->bounds, step->adapters, half->in_sizes,
                                    (int)half->in_count, step->wide, threads);
        }
        if (half->kind == FFN && half->in_lows != NULL) zoo_gate(step->wide, rows, half->out_inputs, step->made, threads);
        if (half->kind == ATTENTION) {
            int64_t dim = half->dim, total = half->in_total, both = half->heads + half->kv_heads;
            float *k = step->wide + half->heads * dim, *v = k + half->kv_heads * dim;
            const int64_t *pages_of = step->token_pages + half->layer * rows;
            if (half->q_norm != NULL) {
                zoo_norm(step->wide, rows, half->heads, dim, total, half->q_norm, half->q_eps, step->wide, total, threads);
                zoo_norm(k, rows, half->kv_heads, dim, total, half->k_norm, half->k_eps, k, total, threads);
            }
            zoo_rotate(step->wide, rows, total, both, dim, step->cosine, step->sine, threads);
            zoo_keep(k, v, total, total, rows, half->kv_heads * dim, step->k_pool, step->v_pool, step->page_stride, pages_of,
                     step->token_offsets, step->narrow ? 2 : 4, (int)step->narrow, threads);
            struct pages pages = {step->k_pool, step->v_pool, step->page_stride, step->page_tokens,
                                  step->tables + half->layer * step->layer_stride, step->table_stride, step->narrow};
            failed |= zoo_decode(step->wide, total, NULL, NULL, step->lengths, rows, half->heads, half->kv_heads, dim, &pages,
                                 half->window, half->scale, 0.0f, step->made, threads);
        }
        int how = half->narrow && half->out_lows == NULL ? ROUNDED : PLAIN;
        failed |= zoo_linear(step->made, rows, half->out_inputs, half->out, 1, how, hidden, hidden, threads);
        if (half->out_lows != NULL)
            failed |= zoo_adapt(step->made, half->out_inputs, half->out_lows, step->bounds, step->adapters, half->out_sizes, 1, hidden,
                                threads);
        if (half->narrow && half->out_lows != NULL) zoo_round(hidden, rows * half->width, threads);
    }
    return failed;
}

/* Rows of one token each, and the places of K, V and angles of their next tokens: `OnwardData` in bindings.py. Page
 * tables as in `struct step`. */
struct onward {
    int64_t *lengths, rows;
    const int64_t *tables;
    int64_t table_stride, layer_stride, layers, groups, page_tokens;
    int64_t *pages, *offsets; /* [layers, rows], [rows] */
    const float *cos_of, *sin_of; /* [positions, dim] */
    int64_t positions, dim;
    float *cosine, *sine; /* [rows, dim] */
};

/* Advance every row by one token. Returns 1, with nothing changed, if a row has no page or no angle for it. */
int zoo_onward(const struct onward *on)
{
    for (int64_t r = 0; r < on->rows; r++) {
        int64_t at = on->lengths[r];
        if (at < 0 || at >= on->positions || at / on->page_tokens >= on->groups) return 1;
    }
    for (int64_t r = 0; r < on->rows; r++) {
        int64_t at = on->lengths[r]++, group = at / on->page_tokens;
        on->offsets[r] = at % on->page_tokens;
        for (int64_t l = 0; l < on->layers; l++)
            on->pages[l * on->rows + r] = on->tables[r * on->table_stride + l * on->layer_stride + group];
        memcpy(on->cosine + r * on->dim, on->cos_of + at * on->dim, on->dim * sizeof(float));
        memcpy(on->sine + r * on->dim, on->sin_of + at * on->dim, on->dim * sizeof(float));
    }
    return 0;
}

/* The index of the first maximum of each row [rows, width]; in a row with NaN, of the first NaN, as torch's argmax. */
void zoo_argmax(const float *x, int64_t rows, int64_t width, int64_t *out, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(rows)) num_threads(threads) if (rows * width > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * width;
        vec best = {0}, odd = {0};
        best += -INFINITY;
        int64_t i = 0;
        for (; i + VL <= width; i += VL) {
            vec v = *(const vec *)(row + i);
            best = pick((ivec)(v > best), v, best);
            odd += v - v; /* NaN where v is NaN or infinite */
        }
        float most = -INFINITY;
        int strange = 0;
        for (int j = 0; j < VL; j++) {
            most = best[j] > most ? best[j] : most;
            strange |= odd[j] != odd[j];
        }
        for (; i < width; i++) {
            most = row[i] > most ? row[i] : most;
            strange |= row[i] - row[i] != 0.0f;
        }
        out[r] = 0;
        if (strange)
            for (i = 0; i < width; i++)
                if (row[i] != row[i]) break;
        if (strange && i < width) {
            out[r] = i;
            continue;
        }
        for (i = 0; i < width; i++)
            if (row[i] == most) {
                out[r] = i;
                break;
            }
    }
}
