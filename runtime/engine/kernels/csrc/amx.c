/* Products of bfloat16 pairs on a tile unit (AMX-BF16), included by kernels.c.
 *
 * A packed panel [pairs][NR] is already in the layout of the unit's second operand: 16 rows of pairs by 16 columns. The
 * first operand is 16 rows of x by 16 pairs. All tiles are full: x is padded with zeros to whole tiles, and so is the
 * end of a panel, in a copy. Each row of a tile is summed alone, in an order fixed by k, so a row's result does not
 * depend on the other rows. TDPBF16PS sums the products of even and of odd inputs of 16 pairs apart, and adds both to
 * the accumulator; denormals are zero. So its bits differ from those of AVX512-BF16.
 *
 * The same code is compiled twice: for the unit, and for an emulation of it in C (Intel's pseudo-code of the instruction).
 * The emulation is the unit's check at the first use, and runs the code's tests where there is no such unit.
 */
#define TILE_ROWS 16
/* Rows per call: two tiles. */
#define TILES_HEIGHT (2 * TILE_ROWS)

/* The operand of LDTILECFG. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* per row */
    uint8_t rows[16];
};

static const struct tile_config FULL_TILES ALIGNED = {
    .palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* m rows of pairs, `step` apart, times one panel -> out, whole tiles of rows of NR values, `across` apart. `last`: the panel's last,
 * incomplete tile with zeros after it, or NULL. `fetch`, if not NULL: `pace` values
 * from it on are prefetched for each tile of pairs, into the second-level cache. */
#define TILES_BLOCK(NAME, ATTRIBUTE, ZERO, LOAD, DOT, STORE) \
    ATTRIBUTE static void NAME(int64_t m, int64_t pairs, const uint32_t *x, int64_t step, const uint32_t *w, const uint32_t *last, \
                               const uint32_t *fetch, int64_t pace, float *out, int64_t across) \
    { \
        int two = m > TILE_ROWS; \
        ZERO(0); \
        ZERO(1); \
        ZERO(2); \
        ZERO(3); \
        for (int64_t p = 0; p < pairs; p += TILE_ROWS) { \
            const uint32_t *b = pairs - p >= TILE_ROWS ? w + p * NR : last; \
            for (int64_t j = 0; j < pace; j += 16) __builtin_prefetch(fetch + p / TILE_ROWS * pace + j, 0, 2); \
            LOAD(6, b, NR * 4); \
            LOAD(4, x + p, step * 4); \
            DOT(0, 4, 6); \
            if (NR > 16) { \
                LOAD(7, b + 16, NR * 4); \
                DOT(1, 4, 7); \
            } \
            if (two) { \
                LOAD(5, x + TILE_ROWS * step + p, step * 4); \
                DOT(2, 5, 6); \
                if (NR > 16) DOT(3, 5, 7); \
            } \
        } \
        STORE(0, out, across * 4); \
        if (NR > 16) STORE(1, out + 16, across * 4); \
        if (two) { \
            STORE(2, out + TILE_ROWS * across, across * 4); \
            if (NR > 16) STORE(3, out + TILE_ROWS * across + 16, across * 4); \
        } \
    }

/* --------------------------------------------------------------------------------------------------------------- emulated */

struct tile_unit {
    struct tile_config config;
    uint32_t tiles[8][TILE_ROWS][16];
};

static _Thread_local struct tile_unit emulated;

/* A tile that is not configured is an invalid instruction. */
static struct tile_unit *unit_with(int t)
{
    if (emulated.config.palette != 1 || emulated.config.rows[t] == 0 || emulated.config.bytes[t] == 0) abort();
    return &emulated;
}

static void emulated_zero(int t) { memset(unit_with(t)->tiles[t], 0, sizeof emulated.tiles[t]); }

static void emulated_load(int t, const void *base, int64_t stride)
{
    struct tile_unit *unit = unit_with(t);
    memset(unit->tiles[t], 0, sizeof unit->tiles[t]);
    for (int r = 0; r < unit->config.rows[t]; r++) memcpy(unit->tiles[t][r], (const char *)base + r * stride, unit->config.bytes[t]);
}

static void emulated_store(int t, void *base, int64_t stride)
{
    struct tile_unit *unit = unit_with(t);
    for (int r = 0; r < unit->config.rows[t]; r++) memcpy((char *)base + r * stride, unit->tiles[t][r], unit->config.bytes[t]);
}

/* A denormal as a zero of its sign. */
static float flushed(float value) { return fabsf(value) < 1.17549435e-38f ? copysignf(0.0f, value) : value; }

/* a * b + c with one rounding, denormals being zero before and after. */
static float emulated_fma(float a, float b, float c) { return flushed(fmaf(flushed(a), flushed(b), flushed(c))); }

/* TDPBF16PS c, a, b. */
static void emulated_dot(int c, int a, int b)
{
    struct tile_unit *unit = unit_with(c);
    for (int m = 0; m < unit_with(a)->config.rows[c]; m++) {
        float sums[32] = {0}, made[16];
        for (int k = 0; k < unit->config.bytes[a] / 4; k++)
            for (int n = 0; n < unit_with(b)->config.bytes[c] / 4; n++)
                for (int h = 0; h < 2; h++)
                    sums[2 * n + h] = emulated_fma(wide_of((uint16_t)(unit->tiles[a][m][k] >> 16 * h)),
                                                   wide_of((uint16_t)(unit->tiles[b][k][n] >> 16 * h)), sums[2 * n + h]);
        memcpy(made, unit->tiles[c][m], sizeof made);
        for (int n = 0; n < unit->config.bytes[c] / 4; n++) made[n] = flushed(flushed(made[n]) + flushed(sums[2 * n] + sums[2 * n + 1]));
        memcpy(unit->tiles[c][m], made, sizeof made);
    }
}

TILES_BLOCK(emulated_block, __attribute__((noinline)), emulated_zero, emulated_load, emulated_dot, emulated_store)

/* -------------------------------------------------------------------------------------------------------------- the unit */

#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define WITH_TILES __attribute__((target("amx-tile,amx-bf16")))
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

TILES_BLOCK(unit_block, WITH_TILES __attribute__((noinline)), _tile_zero, _tile_loadd, _tile_dpbf16ps, _tile_stored)

WITH_TILES static void load_config(void) { _tile_loadconfig(&FULL_TILES); }
WITH_TILES static void release_tiles(void) { _tile_release(); }

/* Whether processor and system have AMX-BF16, and the system allows this process to use it. */
static int has_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 24 & 1) || !(d >> 22 & 1)) return 0; /* AMX-TILE, AMX-BF16 */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
#define unit_block emulated_block
static void load_config(void) { abort(); }
static void release_tiles(void) { abort(); }
static int has_tiles(void) { return 0; }
#endif

/* The number of a path of products with bfloat16 weights: build.py's `PATHS`. */
enum { ANY = 0, WIDEN = 1, AVX512 = 2, AMX = 3, EMULATED = 4 };

/* The path in use, once zoo_products has chosen it. */
static int path = PRODUCTS == ANY ? WIDEN : PRODUCTS;

static int on_tiles(void) { return path == AMX || path == EMULATED; }

/* Called by each thread around the use of tiles. */
static void begin_tiles(void)
{
    if (path == AMX) load_config();
    if (path == EMULATED) emulated.config = FULL_TILES;
}

static void end_tiles(void)
{
    if (path == AMX) release_tiles();
    if (path == EMULATED) emulated.config.palette = 0;
}

static void tiles_block(int64_t m, int64_t pairs, const uint32_t *x, int64_t step, const uint32_t *w, const uint32_t *last, const uint32_t *fetch,
                        int64_t pace, float *out, int64_t across)
{
    if (path == EMULATED)
        emulated_block(m, pairs, x, step, w, last, fetch, pace, out, across);
    else
        unit_block(m, pairs, x, step, w, last, fetch, pace, out, across);
}

/* Units rounded up to whole tiles. */
static int64_t whole_tiles(int64_t units) { return (units + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

/* Whether the unit gives the emulation's bits on one block. */
static int tiles_agree(void)
{
    enum { PAIRS = 2 * TILE_ROWS };
    uint32_t x[TILES_HEIGHT * PAIRS] ALIGNED, w[PAIRS * NR] ALIGNED, state = 1;
    float made[2][TILES_HEIGHT * NR] ALIGNED;
    for (int i = 0; i < TILES_HEIGHT * PAIRS + PAIRS * NR; i++) {
        uint32_t value = 0;
        for (int h = 0; h < 2; h++) { /* values of either sign from 2^-8 to 2^8 */
            state = state * 1664525 + 1013904223;
            value |= ((state >> 16 & 0x87ff) + 0x3b80) << 16 * h;
        }
        if (i < TILES_HEIGHT * PAIRS) x[i] = value;
        else w[i - TILES_HEIGHT * PAIRS] = value;
    }
    emulated.config = FULL_TILES;
    emulated_block(TILES_HEIGHT, PAIRS, x, PAIRS, w, NULL, NULL, 0, made[0], NR);
    emulated.config.palette = 0;
    load_config();
    unit_block(TILES_HEIGHT, PAIRS, x, PAIRS, w, NULL, NULL, 0, made[1], NR);
    release_tiles();
    return memcmp(made[0], made[1], sizeof made[0]) == 0;
}

/* Choose the path: the one that the library was compiled for, or the fastest of this processor. Returns it; 0 if the
 * processor lacks it, -AMX if its tile unit gives other bits than Intel's description of it. Called before any product. */
int64_t zoo_products(void)
{
#if defined(__AVX512BF16__) && VL == 16
    const int vectors = AVX512;
#else
    const int vectors = WIDEN;
#endif
    if (PRODUCTS == ANY) {
        int chosen = has_tiles() && tiles_agree() ? AMX : vectors;
        path = chosen;
    } else if (PRODUCTS == AVX512 && vectors != AVX512) {
        return 0;
    } else if (PRODUCTS == AMX) {
        if (!has_tiles()) return 0;
        if (!tiles_agree()) return -AMX;
    }
    return path;
}
