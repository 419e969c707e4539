/* Vectors of floats in registers, and functions of them; included by kernels.c. */

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

/* A tile reads x at pointers to every third of its rows, and reaches the two after them with an index, because as many
 * pointers as rows do not fit the integer registers. KEPT hides from the compiler how a pointer is made: it would make
 * one per row of them again. */
#define BASES ((MR + 2) / 3)
#define KEPT(pointer) \
    ({ \
        __typeof__(pointer) kept_ = (pointer); \
        __asm__("" : "+r"(kept_)); \
        kept_; \
    })

#define ALIGNED __attribute__((aligned(64)))
#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4), aligned(4)));
typedef float halfvec __attribute__((vector_size(VL * 2), aligned(4))); /* half of a vec, and as doubles */
typedef double dvec __attribute__((vector_size(VL * 4), aligned(8)));

/* A vector of one value. `0 + value` would be an addition: it makes 0 of -0. */
INLINE vec broadcast(float value) { return value - (vec){0}; }

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
    return g * pick(negative, e, broadcast(1.0f)) / (1.0f + e);
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

INLINE int any_of(ivec mask)
{
    int any = 0;
    for (int j = 0; j < VL; j++) any |= mask[j];
    return any;
}
