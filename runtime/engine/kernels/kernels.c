/* CPU kernels: products with packed weights (float32, bfloat16, int8), norms, rotary positions, KV pages in float32 or
 * bfloat16, paged attention. Activations are float32. One file of csrc/ per subject.
 *
 * Plain C with vector extensions and OpenMP, compiled once on the machine that runs it (build.py) and called through
 * ctypes (bindings.py). Every function runs on up to `threads` threads (threads.c); all loops are dynamic. A row's result
 * does not depend on the other rows: products sum over k in one order, and attention is split at fixed positions, so
 * the sampled tokens are the same in any batch.
 */
#define _GNU_SOURCE /* sched_getcpu and processor sets, in threads.c */
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

#include "csrc/vectors.c"

/* Prefetch distance of weights, in floats. */
#define AHEAD 2048

/* Threads take `n` iterations dynamically, an eighth of an equal share at a time, so that a thread that is descheduled
 * does not delay the end much. */
#define SHARE(n) ((n) / (8 * threads) > 0 ? (n) / (8 * threads) : 1)

#if defined(OWN_THREADS)
#include "threads.c"
#endif

struct part {
    const void *weight; /* packed */
    const float *bias;  /* [n] or NULL */
    int64_t n;
    int64_t narrow; /* 1: bfloat16, 2: int8 with scales; the same for all parts of a call */
};

int64_t zoo_panel(void) { return NR; }

enum { PLAIN = 0, GATED_SILU = 1, ROUNDED = 2 };

#include "csrc/bfloat16.c"
#include "csrc/amx.c"
#include "csrc/bfloat16_product.c"
#include "csrc/float32_product.c"
#include "csrc/coded_product.c"
#include "csrc/stored_product.c"
#include "csrc/adapters.c"
#include "csrc/norms.c"
#include "csrc/attention/softmax.c"
#include "csrc/attention/decode_tiles.c"
#include "csrc/attention/decode.c"
#include "csrc/attention/prompt.c"
#include "csrc/layers.c"
#include "csrc/argmax.c"
#include "csrc/sampling.c"
#include "csrc/peaks.c"

#include "csrc/exchange.c"
