/* Masks of grammars, penalties, greedy sampling, log-probabilities; included by kernels.c. */

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

/* One bit for each of the 32 tokens from `from` on: set where a mask [words] allows it and it is below `width`. NULL allows
 * all. */
INLINE uint32_t allowed_from(int64_t from, int64_t width, const uint32_t *mask, int64_t words)
{
    const uint32_t word = !mask ? 0xffffffffu : from / 32 < words ? mask[from / 32] : 0;
    return width - from < 32 ? word & ((1u << (width - from)) - 1) : word;
}

/* The lanes that the lowest VL bits of a word set. */
INLINE ivec lanes_of(uint32_t word)
{
    const ivec each = (ivec){0} + (int32_t)word;
    ivec bits;
    for (int j = 0; j < VL; j++) bits[j] = (int32_t)(1u << j);
    return (ivec)((each & bits) != 0);
}

/* The largest of the values [width] that a mask allows, NaN left out; minus infinity if there is none. `odd`: whether NaN or an
 * infinity may be among them. */
static float largest_of(const float *row, int64_t width, const uint32_t *mask, int64_t words, int *odd)
{
    vec best = broadcast(-INFINITY), strange = {0};
    float most = -INFINITY;
    *odd = 0;
    for (int64_t from = 0; from < width; from += 32) {
        const uint32_t word = allowed_from(from, width, mask, words);
        if (word == 0) continue;
        if (word == 0xffffffffu) {
            for (int j = 0; j < 32; j += VL) {
                const vec v = *(const vec *)(row + from + j);
                best = pick((ivec)(v > best), v, best);
                strange += v - v; /* NaN where v is NaN or infinite */
            }
        } else if (width - from >= 32) {
            for (int j = 0; j < 32; j += VL) {
                const ivec in = lanes_of(word >> j);
                const vec v = *(const vec *)(row + from + j);
                best = pick((ivec)(v > best) & in, v, best);
                strange += (vec)((ivec)(v - v) & in);
            }
        } else
            for (int64_t i = from; i < width; i++) {
                if (!(word >> (i - from) & 1)) continue;
                most = row[i] > most ? row[i] : most;
                *odd |= row[i] - row[i] != 0.0f;
            }
    }
    for (int j = 0; j < VL; j++) *odd |= strange[j] != strange[j];
    const float found = max_of(best);
    return found > most ? found : most;
}

/* The first of the values [width] that a mask allows and that equals `value`, or is NaN if that is; -1 if there is none. */
static int64_t index_where(const float *row, int64_t width, const uint32_t *mask, int64_t words, float value)
{
    const int wants_nan = value != value;
    for (int64_t from = 0; from < width; from += 32) {
        const uint32_t word = allowed_from(from, width, mask, words);
        if (word == 0) continue;
        if (width - from >= 32) {
            ivec hits = {0};
            for (int j = 0; j < 32; j += VL) {
                const vec v = *(const vec *)(row + from + j);
                hits |= wants_nan ? (ivec)(v != v) : (ivec)(v == value);
            }
            if (!any_of(hits)) continue;
        }
        for (int64_t i = from; i < width && i < from + 32; i++)
            if (word >> (i - from) & 1 && (wants_nan ? row[i] != row[i] : row[i] == value)) return i;
    }
    return -1;
}

/* The index of the first maximum of each of `count` rows of x [.., width], in out[row]; in a row with NaN, of the first NaN, as
 * torch's argmax. at: the rows; NULL: the first ones. masks[row] [words[row]]: as of zoo_allow, what comes into question, NULL
 * for all; of a row in which that is minus infinity only, the index is 0. masks may be NULL. */
void zoo_argmax(const float *x, int64_t count, int64_t width, const int64_t *at, const uint32_t *const *masks, const int64_t *words,
                int64_t *out, int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(count)) num_threads(threads) if (count * width > 16384)
    for (int64_t n = 0; n < count; n++) {
        const int64_t r = at ? at[n] : n, length = masks ? words[r] : 0;
        const float *row = x + r * width;
        const uint32_t *mask = masks ? masks[r] : NULL;
        int odd;
        const float most = largest_of(row, width, mask, length, &odd);
        int64_t place = odd ? index_where(row, width, mask, length, NAN) : -1;
        if (place < 0 && most > -INFINITY) place = index_where(row, width, mask, length, most);
        out[r] = place < 0 ? 0 : place;
    }
}

/* What a row's penalties count: `count` tokens, and how often each is in the output. */
struct penalties {
    float *row; /* [width] */
    const int64_t *ids, *counts;
    int64_t count;
    float repetition, frequency, presence;
};

void zoo_penalise(const struct penalties *rows, int64_t count, int64_t width)
{
    for (int64_t r = 0; r < count; r++) {
        const struct penalties p = rows[r];
        for (int64_t i = 0; i < p.count; i++) {
            if (p.ids[i] < 0 || p.ids[i] >= width) continue;
            float v = p.row[p.ids[i]];
            if (p.repetition != 1.0f) v = v > 0.0f ? v / p.repetition : v * p.repetition;
            if (p.counts[i] > 0) v -= p.frequency * (float)p.counts[i] + p.presence;
            p.row[p.ids[i]] = v;
        }
    }
}

/* Weights that are summed in float32 before their sum is added in float64. */
#define SPAN (64 * VL)

enum { MOST_BEST = 64 };

/* Log-probabilities of x [rows, width]: of chosen[r] in own[r], and of each row the `best` highest in values, with their tokens in
 * ids [rows, best], the highest first, of equals the first. Minus infinity fills up what is not there. best <= MOST_BEST. */
void zoo_scored(const float *x, int64_t rows, int64_t width, const int64_t *chosen, int64_t best, float *own, float *values, int64_t *ids,
                int threads)
{
#pragma omp parallel for schedule(dynamic, SHARE(rows)) num_threads(threads) if (rows * width > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = x + r * width;
        float top[MOST_BEST + 1];
        int64_t at[MOST_BEST + 1], i = 0;
        for (int64_t j = 0; j < MOST_BEST + 1; j++) top[j] = -INFINITY, at[j] = 0;
        const int64_t kept = best > 0 ? best : 1; /* the first of them is the maximum, which the sum needs */
        for (; i < width; i += VL) {
            const int64_t end = width - i < VL ? width - i : VL;
            if (end == VL && !any_of((ivec)(*(const vec *)(row + i) > broadcast(top[kept - 1])))) continue;
            for (int64_t j = i; j < i + end; j++) {
                if (!(row[j] > top[kept - 1])) continue;
                int64_t place = kept - 1;
                for (; place > 0 && row[j] > top[place - 1]; place--) top[place] = top[place - 1], at[place] = at[place - 1];
                top[place] = row[j], at[place] = j;
            }
        }
        double sum = 0.0;
        for (i = 0; i < width; i += SPAN) {
            vec part = {0};
            const int64_t end = width - i < SPAN ? width : i + SPAN;
            int64_t j = i;
            for (; j + VL <= end; j += VL) part += exp_of(*(const vec *)(row + j) - top[0]);
            if (j < end) {
                vec rest = broadcast(-INFINITY);
                for (int64_t k = j; k < end; k++) rest[k - j] = row[k];
                part += exp_of(rest - top[0]);
            }
            sum += sum_of(part);
        }
        const double whole = top[0] + log(sum);
        own[r] = chosen[r] >= 0 && chosen[r] < width ? (float)(row[chosen[r]] - whole) : NAN;
        for (int64_t j = 0; j < best; j++) values[r * best + j] = (float)(top[j] - whole), ids[r * best + j] = at[j];
    }
}
