/* Masks of grammars, and greedy sampling; included by kernels.c. */

/* Set to minus infinity what a mask does not allow, in `count` rows of x [.., width]: masks[i] [words[i]] is that of rows[i],
 * with value v in bit v % 32 of word v / 32. Values behind its end are not allowed. */
void zoo_allow(float *x, int64_t width, int64_t count, const int64_t *rows, const uint32_t *const *masks, const int64_t *words,
               int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(count)) num_threads(threads) if (count * width > 65536)
    for (int64_t r = 0; r < count; r++) {
        float *row = x + rows[r] * width;
        for (int64_t from = 0; from < width; from += 32) {
            const uint32_t word = from / 32 < words[r] ? masks[r][from / 32] : 0;
            const int64_t here = width - from < 32 ? width - from : 32;
            if (word == 0xffffffffu) continue;
            for (int64_t j = 0; j < here; j++) row[from + j] = word >> j & 1 ? row[from + j] : -INFINITY;
        }
    }
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
