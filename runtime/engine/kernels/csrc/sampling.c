/* Draws from truncated distributions without a sort; included by kernels.c.
 *
 * The weights of a row are exp((logit - highest) / temperature), the highest being 1. What top-k, top-p and min-p leave
 * are the weights of at least some threshold, those that equal it included. One number in [0, 1) is looked up in the
 * cumulated weights that are left, in the order of the vocabulary.
 */

/* The sum of the weights of at least `least`, and those of the spans of w [width], which is a multiple of SPAN. */
static double sums_of(const float *w, int64_t width, float least, double *sums)
{
    double all = 0.0;
    for (int64_t from = 0; from < width; from += SPAN) {
        vec made[4] = {{0}};
        for (int64_t i = from; i < from + SPAN; i += 4 * VL)
            for (int j = 0; j < 4; j++) {
                vec v = *(const vec *)(w + i + j * VL);
                made[j] += pick((ivec)(v >= broadcast(least)), v, (vec){0});
            }
        sums[from / SPAN] = sum_of((made[0] + made[1]) + (made[2] + made[3]));
        all += sums[from / SPAN];
    }
    return all;
}

/* The largest weight for which the weights of at least as much amount to `goal`: are so many, or, if `mass`, so much in
 * sum. 0 if all together do not. Weights below `floor` are known to be below the result. `beyond`: what they amount to
 * beyond the goal, because weights are equal.
 *
 * The bits of weights in [0, 1] are in the order of the weights, so three histograms find the result, each over ten bits
 * of those weights that have the bits found before. */
static float threshold_of(const float *w, int64_t width, double goal, int mass, float floor, double *beyond)
{
    enum { DIGIT = 10, DIGITS = 1 << DIGIT };
    double amount[DIGITS], above = 0.0;
    union { uint32_t bits; float value; } found = {0}, end = {.value = 2.0f}, each;
    for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
        const float from = found.value > floor ? found.value : floor;
        memset(amount, 0, sizeof amount);
        for (int64_t i = 0; i < width; i += VL) {
            vec v = *(const vec *)(w + i);
            ivec within = (ivec)(v >= broadcast(from)) & (ivec)(v < broadcast(end.value));
            if (!any_of(within)) continue;
            for (int j = 0; j < VL; j++)
                if (within[j]) {
                    each.value = v[j];
                    amount[(each.bits >> shift) & (DIGITS - 1)] += mass ? (double)v[j] : 1.0;
                }
        }
        uint32_t digit = DIGITS - 1;
        for (; digit > 0 && above + amount[digit] < goal; digit--) above += amount[digit];
        end.bits = found.bits + ((digit + 1) << shift);
        found.bits += digit << shift;
        *beyond = above + amount[digit] - goal;
    }
    return found.value;
}

/* The place in w [width] at which the cumulated weights of at least `least` exceed u of their sum. */
static int64_t index_of(const float *w, int64_t width, float least, double u, double *sums)
{
    double goal = u * sums_of(w, width, least, sums), made = 0.0;
    int64_t span = 0, place = 0;
    for (; span < width / SPAN - 1 && made + sums[span] <= goal; span++) made += sums[span];
    for (int64_t i = span * SPAN; i < (span + 1) * SPAN; i++)
        if (w[i] > 0.0f && w[i] >= least) {
            place = i; /* the last one that is left, where rounding has made the sum of the span larger */
            made += w[i];
            if (made > goal) break;
        }
    return place;
}

/* The weights w [padded] of a row [width] with the highest value `most`: 0 for what a mask does not allow and behind the row. */
static void weigh(const float *row, int64_t width, const uint32_t *mask, int64_t words, float most, float scale, float *w, int64_t padded)
{
    for (int64_t from = 0; from < padded; from += 32) {
        const uint32_t word = from < width ? allowed_from(from, width, mask, words) : 0;
        if (word == 0) {
            memset(w + from, 0, 32 * sizeof *w);
            continue;
        }
        for (int j = 0; j < 32; j += VL) {
            vec v = broadcast(-INFINITY);
            if (word == 0xffffffffu)
                v = *(const vec *)(row + from + j);
            else if (width - from >= 32)
                v = pick(lanes_of(word >> j), *(const vec *)(row + from + j), v);
            else
                for (int k = 0; k < VL; k++) v[k] = word >> (j + k) & 1 ? row[from + j + k] : -INFINITY;
            *(vec *)(w + from + j) = exp_of((v - most) * scale);
        }
    }
}

/* One token for each of `count` rows of x [.., width], in out[row]. at: the rows; NULL: the first ones. Of row at[n] in place n: a
 * temperature above 0, top_k (0 for all), top_p, min_p, and u in [0, 1). masks: as of zoo_argmax. Of a row without a finite
 * highest logit, which has no weights, the first. Returns 0, or -1 without memory. */
int zoo_sampled(const float *x, int64_t count, int64_t width, const int64_t *at, const uint32_t *const *masks, const int64_t *words,
                const float *temperature, const int64_t *top_k, const float *top_p, const float *min_p, const double *u, int64_t *out,
                int threads)
{
    const int64_t padded = (width + SPAN - 1) / SPAN * SPAN;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (count * width > 16384)
    for (int64_t n = 0; n < count; n++) {
        const int64_t r = at ? at[n] : n, length = masks ? words[r] : 0;
        const float *row = x + r * width;
        const uint32_t *mask = masks ? masks[r] : NULL;
        float *w = malloc((size_t)padded * sizeof *w + (size_t)(padded / SPAN) * sizeof(double));
        out[r] = w ? 0 : -1;
        if (!w) continue;
        double *sums = (double *)(w + padded);
        int odd;
        weigh(row, width, mask, length, largest_of(row, width, mask, length, &odd), 1.0f / temperature[n], w, padded);
        double ties = 0.0, unused;
        float ranked = top_k[n] > 0 && top_k[n] < width ? threshold_of(w, padded, (double)top_k[n], 0, 0.0f, &ties) : 0.0f;
        float least = min_p[n] > ranked ? min_p[n] : ranked;
        if (top_p[n] < 1.0f) {
            /* Weights below the floor are together less than top-p leaves out. */
            const double whole = sums_of(w, padded, ranked, sums) - ties * ranked, share = top_p[n];
            const float floor = (float)(0.5 * (1.0 - share) * whole / (double)width);
            float nucleus = threshold_of(w, padded, share * whole, 1, floor, &unused);
            least = nucleus > least ? nucleus : least;
        }
        out[r] = index_of(w, padded, least, u[n], sums);
        free(w);
    }
    for (int64_t n = 0; n < count; n++)
        if (out[at ? at[n] : n] < 0) return -1;
    return 0;
}
