/* What the processor can do at most, to compare the products with: included by kernels.c. */

#define CHAINS 12

/* Keeps a call in its loop: a function without side effects would be called once for all shares. */
#define ANEW __asm__ volatile("" ::: "memory")

/* n times CHAINS independent multiply-adds of vectors; the loops over chains are unrolled to keep the sums in
 * registers, and begin with different values because equal ones would be computed once. */
#define CHAINED(NAME, NEXT) \
    static __attribute__((noinline)) float NAME(int64_t n) \
    { \
        vec acc[CHAINS], one = broadcast(1.0f); \
        uvec pair = (uvec){0} + 0x3f803f80u; \
        float total = 0.0f; \
        ANEW; \
        _Pragma("GCC unroll 12") for (int c = 0; c < CHAINS; c++) acc[c] = broadcast((float)c); \
        for (int64_t i = 0; i < n; i++) \
            _Pragma("GCC unroll 12") for (int c = 0; c < CHAINS; c++) acc[c] = NEXT; \
        _Pragma("GCC unroll 12") for (int c = 0; c < CHAINS; c++) total += sum_of(acc[c] + one + (vec)pair); \
        return total; \
    }
CHAINED(chain_floats, fused(one, one, acc[c]))
CHAINED(chain_pairs, dot_pairs(acc[c], pair, pair))

/* The same on tiles: blocks of LONG pairs, which stay in the L1 cache. */
#define LONG (8 * TILE_ROWS)
static __attribute__((noinline)) float chain_tiles(int64_t n)
{
    uint32_t x[TILES_HEIGHT * LONG] ALIGNED = {0}, w[LONG * NR] ALIGNED = {0};
    float made[TILES_HEIGHT * NR] ALIGNED;
    ANEW;
    begin_tiles();
    for (int64_t i = 0; i < n; i++) tiles_block(TILES_HEIGHT, LONG, x, LONG, w, NULL, NULL, 0, made, NR);
    end_tiles();
    return made[0];
}

/* Multiply and add without touching memory: n rounds on float32, or as products with bfloat16 weights do, in each of 8 *
 * threads shares. Returns the floating-point operations. */
double zoo_multiply_add(int64_t n, int narrow, int threads)
{
    const int64_t shares = 8 * threads;
    const int tiles = narrow && on_tiles();
    volatile float kept = 0.0f; /* the sums must look used */
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t share = 0; share < shares; share++) kept = tiles ? chain_tiles(n) : narrow ? chain_pairs(n) : chain_floats(n);
    (void)kept;
    const double each = tiles ? TILES_HEIGHT * NR * LONG * 4.0 : CHAINS * VL * (narrow ? 4.0 : 2.0);
    return (double)shares * (double)n * each;
}

/* Read `bytes` bytes once, in pieces of 1 MiB on `threads`. Returns the bits that any of their words has. */
int64_t zoo_read(const char *from, int64_t bytes, int threads)
{
    enum { PIECE = 1 << 20, AHEAD_BYTES = 4096 };
    uint32_t any = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t piece = 0; piece < bytes / PIECE; piece++) {
        uvec bits[4] = {{0}};
        for (const char *p = from + piece * PIECE; p < from + (piece + 1) * PIECE; p += 4 * VL * 4) {
            for (int j = 0; j < 4 * VL * 4; j += 64) __builtin_prefetch(p + AHEAD_BYTES + j);
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) bits[j] |= *(const uvec *)(p + j * VL * 4);
        }
        uvec all = bits[0] | bits[1] | bits[2] | bits[3];
        uint32_t mine = 0;
        for (int j = 0; j < VL; j++) mine |= all[j];
        __atomic_fetch_or(&any, mine, __ATOMIC_RELAXED);
    }
    return any;
}
