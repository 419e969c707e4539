/* Low-rank adapters on their own rows, and the gate behind products with them; included by kernels.c. */

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
