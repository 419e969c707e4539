/* All layers of a step in one call, and advancing the rows of a decode step; included by kernels.c. */

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
    int64_t stops;  /* its attention is the caller's */
    struct away *away; /* attention to pages of which other devices hold some (exchange.c), or NULL */
};

/* What the rows of a step have in common; each row is one token, also of a prompt. Scratch: normed [rows, width], wide [rows, widest
 * in_total], made [rows, widest out_inputs]. */
struct step {
    int64_t rows;
    const float *cosine, *sine;
    char *k_pool, *v_pool;
    int64_t page_stride, page_tokens;
    const int64_t *token_pages, *token_offsets; /* [layers, rows], [rows] */
    const int64_t *tables;                      /* [rows, layers, groups] by the two strides */
    int64_t table_stride, layer_stride;
    const int64_t *lengths; /* of sequences with one token each, which are all where there are no chunks */
    const int64_t *bounds;
    int64_t adapters;
    float *normed, *wide, *made;
    int64_t narrow;             /* pools are bfloat16 */
    const struct chunk *chunks; /* of prompts */
    int64_t chunk_count;
    const int64_t *singles, *single_tables; /* the other sequences' tokens, and where they are in the tables, NULL for 0, 1, … */
    int64_t single_count;
};

static int attend_half_away(const struct half *half, const struct step *step, int threads);

/* Norm and first products of a half: into `made` for an FFN, into `wide` for attention, whose K and V are written, too. */
static int enter_half(const float *hidden, const struct half *half, const struct step *step, int threads)
{
    int64_t rows = step->rows, dim = half->dim, total = half->in_total, both = half->heads + half->kv_heads;
    int failed = 0;
    zoo_norm(hidden, rows, 1, half->width, half->width, half->norm, half->eps, step->normed, half->width, threads);
    if (half->kind == FFN && half->in_lows == NULL)
        return zoo_linear(step->normed, rows, half->width, half->in, 2, GATED_SILU, NULL, step->made, threads);
    failed |= zoo_linear(step->normed, rows, half->width, half->in, (int)half->in_count, PLAIN, NULL, step->wide, threads);
    if (half->in_lows != NULL)
        failed |= zoo_adapt(step->normed, half->width, half->in_lows, step->bounds, step->adapters, half->in_sizes,
                            (int)half->in_count, step->wide, threads);
    if (half->kind == FFN) {
        zoo_gate(step->wide, rows, half->out_inputs, step->made, threads);
        return failed;
    }
    float *k = step->wide + half->heads * dim, *v = k + half->kv_heads * dim;
    if (half->q_norm != NULL) {
        zoo_norm(step->wide, rows, half->heads, dim, total, half->q_norm, half->q_eps, step->wide, total, threads);
        zoo_norm(k, rows, half->kv_heads, dim, total, half->k_norm, half->k_eps, k, total, threads);
    }
    zoo_rotate(step->wide, rows, total, both, dim, step->cosine, step->sine, threads);
    zoo_keep(k, v, total, total, rows, half->kv_heads * dim, step->k_pool, step->v_pool, step->page_stride,
             step->token_pages + half->layer * rows, step->token_offsets, step->narrow ? 2 : 4, (int)step->narrow, threads);
    return failed;
}

/* Attention of the queries in `wide` over the pages, into `made`. */
static int attend_half(const struct half *half, const struct step *step, int threads)
{
    struct pages pages = {step->k_pool, step->v_pool, step->page_stride, step->page_tokens,
                          step->tables + half->layer * step->layer_stride, step->table_stride, step->narrow};
    int failed = 0;
    if (step->chunk_count > 0)
        failed = zoo_chunks(step->wide, half->in_total, step->chunks, step->chunk_count, half->heads, half->kv_heads, half->dim, &pages,
                            half->window, half->scale, 0.0f, step->made, NULL, threads);
    int64_t singles = step->single_count > 0 || step->chunk_count > 0 ? step->single_count : step->rows;
    if (!failed && singles > 0)
        failed = zoo_decode(step->wide, half->in_total, step->singles, step->single_tables, step->lengths, singles, half->heads,
                            half->kv_heads, half->dim, &pages, half->window, half->scale, 0.0f, step->made, NULL, threads);
    return failed;
}

/* Last product of a half, of `made`, added to hidden. */
static int leave_half(float *hidden, const struct half *half, const struct step *step, int threads)
{
    int how = half->narrow && half->out_lows == NULL ? ROUNDED : PLAIN;
    int failed = zoo_linear(step->made, step->rows, half->out_inputs, half->out, 1, how, hidden, hidden, threads);
    if (half->out_lows != NULL)
        failed |= zoo_adapt(step->made, half->out_inputs, half->out_lows, step->bounds, step->adapters, half->out_sizes, 1, hidden,
                            threads);
    if (half->narrow && half->out_lows != NULL) zoo_round(hidden, step->rows * half->width, threads);
    return failed;
}

/* Run hidden [rows, width] through `count` halves, in place. `resumes`: the first one's attention is in `made` already. Returns 0, 1
 * if out of memory, or 2 + the number of a half whose attention, or the rest of it, is left to the caller, with its queries in `wide`. */
int zoo_layers(float *hidden, const struct half *halves, int64_t count, const struct step *step, int resumes, int threads)
{
    for (int64_t i = 0; i < count; i++) {
        const struct half *half = halves + i;
        if (!resumes || i > 0) {
            if (enter_half(hidden, half, step, threads)) return 1;
            if (half->stops) return 2 + (int)i;
            if (half->away != NULL) {
                if (attend_half_away(half, step, threads)) return 2 + (int)i;
            } else if (half->kind == ATTENTION && attend_half(half, step, threads)) {
                return 1;
            }
        }
        if (leave_half(hidden, half, step, threads)) return 1;
    }
    return 0;
}

/* Rows of one token each, and the places of K, V and angles of their next tokens: `OnwardData` in signatures.py. Page
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
