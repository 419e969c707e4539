/* Packets of the agents' side link, without Python; included by kernels.c.
 *
 *     debtor      zoo_attend_away   sends a layer's questions, attends to what is here, receives the answers and merges; so does
 *                                   zoo_layers in each layer of a step of which other devices hold pages
 *                 zoo_receive       waits for a packet
 *     creditor    zoo_answer        answers questions to lent pages that have been answered before, byte for byte but for their
 *                                   queries and the number of the message
 *
 * Whatever is not such a question or its answer is handed to the caller as it came: Python alone knows the protocol. A wait spins
 * for a bounded time, then sleeps. As in threads.c the bound grows while waits end within it, and shrinks when waits outlive it, so
 * that a core is not taken from other work for long. Linux only.
 */
#if defined(__linux__)
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <time.h>

#if !defined(OWN_THREADS)
static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
#endif

/* How long waits of one kind spin, and at most, in ns. */
struct spin {
    int64_t limit, most;
};

/* After a wait of this length: whether it slept. */
static void adapt_spin(struct spin *spin, int64_t length, int slept)
{
    int64_t limit = spin->limit - spin->limit / 4;
    if (!slept) limit = spin->limit + spin->limit / 16 + 1;
    else if (length < spin->most && limit < length) limit = length;
    spin->limit = limit < spin->most ? limit : spin->most;
}

INLINE int nothing_yet(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

/* Wait up to `ms` for a packet, which goes into `into`. Returns its length, also of one that is longer than `room` and was cut; 0 at
 * the end of the connection; -1 if none came, -2 for an error. */
int64_t zoo_receive(int file, void *into, int64_t room, struct spin *spin, int ms)
{
    int64_t begin = now_ns();
    for (int slept = 0;;) {
        ssize_t length = recv(file, into, (size_t)room, MSG_DONTWAIT | MSG_TRUNC);
        if (length >= 0) {
            adapt_spin(spin, now_ns() - begin, slept);
            return length;
        }
        if (!nothing_yet()) return -2;
        int64_t waited = now_ns() - begin;
        if (waited < spin->limit) continue;
        if (waited >= (int64_t)ms * 1000000) {
            adapt_spin(spin, waited, 1);
            return -1;
        }
        slept = 1;
        struct pollfd one = {file, POLLIN, 0};
        if (poll(&one, 1, ms - (int)(waited / 1000000)) < 0 && errno != EINTR) return -2;
    }
}

/* A connection: the numbers of the next messages on it, and how many questions have been answered. */
struct end {
    int64_t file;
    uint64_t due, next;
    int64_t answered;
};

/* A message's packet up to its arrays, of any number, and where that is. */
struct head {
    const char *data;
    int64_t bytes, number_at;
};

enum { MOST_HEAD = 1024 };

/* Whether a packet begins with this head and a number. */
INLINE int begins_with(const char *packet, const struct head *head, uint64_t number)
{
    int64_t at = head->number_at, behind = at + 8;
    return memcmp(packet + at, &number, 8) == 0 && memcmp(packet, head->data, (size_t)at) == 0 &&
           memcmp(packet + behind, head->data + behind, (size_t)(head->bytes - behind)) == 0;
}

/* Send a packet with a number and an array; whether it went out. */
static int send_packet(int64_t file, const struct head *head, uint64_t number, const void *array, int64_t bytes)
{
    char numbered[MOST_HEAD];
    if (head->bytes > MOST_HEAD) return 0;
    memcpy(numbered, head->data, (size_t)head->bytes);
    memcpy(numbered + head->number_at, &number, 8);
    struct iovec parts[2] = {{numbered, (size_t)head->bytes}, {(void *)array, (size_t)bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    return sendmsg((int)file, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)(head->bytes + bytes);
}

/* What zoo_decode is given: rows of one token each, in their order. */
struct decoding {
    const int64_t *lengths;
    int64_t rows, heads, kv_heads, dim;
    struct pages pages;
    float scale, cap;
};

static int64_t queries_of(const struct decoding *how) { return how->rows * how->heads * how->dim; }

/* Attend with queries at any byte, of bfloat16 if `narrow`, else of float32. `wide`: room for them. Returns 1 without memory. */
static int attend_to(const struct decoding *how, const char *queries, int64_t narrow, float *wide, double *values, double *sums, int64_t threads)
{
    int64_t count = queries_of(how);
    for (int64_t i = 0; i < count && narrow; i++) {
        uint16_t bits;
        memcpy(&bits, queries + 2 * i, 2);
        wide[i] = wide_of(bits);
    }
    if (!narrow) memcpy(wide, queries, (size_t)count * 4);
    return zoo_decode(wide, how->heads * how->dim, NULL, NULL, how->lengths, how->rows, how->heads, how->kv_heads, how->dim, &how->pages, 0,
                      how->scale, how->cap, values, sums, (int)threads);
}

/* -------------------------------------------------------------------------------------------------------------- debtor */

/* What one creditor is asked and answers: of some rows of the queries, and the numbers of its parts of these in the room. */
struct asked {
    struct end *end;
    struct head question, answer;
    const int64_t *rows, *places; /* [count] */
    int64_t count;
};

/* Attention of decoding rows to tokens here and elsewhere, in one layer. */
struct away {
    const struct asked *asked;
    int64_t count;
    const char *queries; /* [rows, heads, dim], as they are sent */
    int64_t narrow;
    char *some; /* room for queries of some rows */
    float *wide;
    struct decoding here;
    const int64_t *places;        /* of what is here, by row */
    double *own_values, *own_sums; /* room for attention to what is here */
    double *values, *sums;        /* the room: parts of all rows */
    int64_t parts;
    float *out; /* NULL: parts are not merged */
    char *packet;
    int64_t room, length;
    struct spin *spin;
    int64_t ms, threads;
    int64_t sent, attended, received; /* what has been done: the first questions, what is here, the first answers */
    /* of a whole step: where its rows are in the step, room for their queries and results, and the step's other rows or NULL */
    const int64_t *step_rows;
    float *step_queries, *step_out;
    const struct step *others;
    int64_t beside; /* whether these have been attended to */
};

/* Put parts of `count` rows, back to back, where they belong; NULL for all rows. */
static void place_parts(const struct away *all, const int64_t *rows, const int64_t *places, int64_t count, const char *values, const char *sums)
{
    int64_t heads = all->here.heads, wide = heads * all->here.dim;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = places[i] * all->here.rows + (rows == NULL ? i : rows[i]);
        memcpy(all->values + at * wide, values + i * wide * 8, (size_t)wide * 8);
        memcpy(all->sums + at * 2 * heads, sums + i * heads * 16, (size_t)heads * 16);
    }
}

/* Send the questions. Returns 1 where one could not be sent. */
static int ask_all(struct away *all)
{
    int64_t bytes = all->here.heads * all->here.dim * (all->narrow ? 2 : 4);
    all->sent = all->attended = all->received = all->beside = 0;
    all->length = -1;
    for (; all->sent < all->count; all->sent++) {
        const struct asked *one = all->asked + all->sent;
        for (int64_t i = 0; i < one->count; i++) memcpy(all->some + i * bytes, all->queries + one->rows[i] * bytes, (size_t)bytes);
        if (!send_packet(one->end->file, &one->question, one->end->next, all->some, one->count * bytes)) return 1;
        one->end->next++;
    }
    return 0;
}

/* Attend to what is here, receive the answers and merge. Returns as `zoo_attend_away`. */
static int finish_away(struct away *all)
{
    const struct decoding *how = &all->here;
    if (attend_to(how, all->queries, all->narrow, all->wide, all->own_values, all->own_sums, all->threads)) return 1;
    place_parts(all, NULL, all->places, how->rows, (const char *)all->own_values, (const char *)all->own_sums);
    all->attended = 1;
    for (; all->received < all->count; all->received++) {
        const struct asked *one = all->asked + all->received;
        int64_t heads = one->count * how->heads, values = heads * how->dim * 8, head = one->answer.bytes;
        int64_t length = zoo_receive((int)one->end->file, all->packet, all->room, all->spin, (int)all->ms);
        if (length == -1) return 1;
        if (length != head + values + heads * 16 || !begins_with(all->packet, &one->answer, one->end->due)) {
            all->length = length < 0 ? 0 : length < all->room ? length : all->room;
            return 1;
        }
        one->end->due++;
        place_parts(all, one->rows, one->places, one->count, all->packet + head, all->packet + head + values);
    }
    if (all->out != NULL) zoo_merge(all->values, all->sums, all->parts, how->rows * how->heads, how->dim, all->out, NULL);
    return 0;
}

/* Ask, attend and merge. Returns 0, or 1 with what has been done where the rest is the caller's: a question cannot be sent, or an
 * answer does not come within `ms`, or is another packet: `length` bytes of `packet`, else -1. */
int zoo_attend_away(struct away *all)
{
    return ask_all(all) || finish_away(all);
}

/* The same for the queries of a half in `wide` of a step, into `made`, where the step's other rows attend meanwhile. */
static int attend_half_away(const struct half *half, const struct step *step, int threads)
{
    struct away *all = half->away;
    int64_t rows = all->here.rows, width = half->heads * half->dim;
    for (int64_t r = 0; r < rows; r++)
        memcpy(all->step_queries + r * width, step->wide + all->step_rows[r] * half->in_total, (size_t)width * 4);
    all->queries = (const char *)all->step_queries;
    all->out = all->step_out;
    if (ask_all(all)) return 1;
    if (all->others != NULL) {
        if (attend_half(half, all->others, threads)) return 1;
        all->beside = 1;
    }
    if (finish_away(all)) return 1;
    for (int64_t r = 0; r < rows; r++) memcpy(step->made + all->step_rows[r] * width, all->step_out + r * width, (size_t)width * 4);
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------ creditor */

/* A question, the connection that it comes from, and its answer. */
struct question {
    int64_t end;
    struct head head, answer;
    int64_t narrow; /* queries are bfloat16, else float32 */
    struct decoding how;
};

enum { MOST_FILES = 256 };
enum { QUIET = 0, READY = 1, PACKET = 2 };

struct answers {
    struct end *ends;
    int64_t end_count;
    const struct question *known;
    int64_t known_count, at; /* `at`: the one that is likely next */
    const int64_t *others;   /* descriptors of what is not answered here */
    int64_t other_count;
    const _Atomic int64_t *stamp; /* changes when what is known is no longer true */
    int64_t expected;             /* the stamp of what is known */
    char *packet;
    int64_t room, length, from; /* bytes of the packet's buffer; the packet that came last, and the end that it came from */
    float *queries;
    double *made; /* room for the widest question's queries and answer */
    struct spin spin;
    int64_t ms, threads;
};

static const struct question *question_of(struct answers *all)
{
    uint64_t due = all->ends[all->from].due;
    for (int64_t i = 0; i < all->known_count; i++) {
        int64_t at = (all->at + i) % all->known_count;
        const struct question *one = all->known + at;
        if (one->end != all->from || all->length != one->head.bytes + queries_of(&one->how) * (one->narrow ? 2 : 4)) continue;
        if (!begins_with(all->packet, &one->head, due)) continue;
        all->at = at + 1;
        return one;
    }
    return NULL;
}

/* Attend and send the answer; whether both were done. */
static int answer(struct answers *all, const struct question *one, struct end *end)
{
    int64_t count = queries_of(&one->how), sums = one->how.rows * one->how.heads * 2;
    if (attend_to(&one->how, all->packet + one->head.bytes, one->narrow, all->queries, all->made, all->made + count, all->threads)) return 0;
    if (!send_packet(end->file, &one->answer, end->next, all->made, (count + sums) * 8)) return 0;
    end->due++;
    end->next++;
    end->answered++;
    return 1;
}

/* Answer what can be answered. Returns QUIET after `ms` without a question, READY when another descriptor is, or PACKET for one that
 * is not answered here: `length` bytes from end `from`. */
int zoo_answer(struct answers *all)
{
    struct pollfd files[MOST_FILES];
    int64_t count = all->end_count + all->other_count, begin = now_ns();
    if (count > MOST_FILES) return READY;
    for (int64_t i = 0; i < count; i++)
        files[i] = (struct pollfd){(int)(i < all->end_count ? all->ends[i].file : all->others[i - all->end_count]), POLLIN, 0};
    for (int slept = 0;;) {
        int came = 0;
        for (int64_t e = 0; e < all->end_count; e++) {
            ssize_t length = recv((int)all->ends[e].file, all->packet, (size_t)all->room, MSG_DONTWAIT | MSG_TRUNC);
            if (length < 0 && nothing_yet()) continue;
            if (length < 0) return READY;
            if (!came++) adapt_spin(&all->spin, now_ns() - begin, slept);
            all->length = length;
            all->from = e;
            const struct question *one = length <= all->room ? question_of(all) : NULL;
            if (one == NULL || atomic_load(all->stamp) != all->expected || !answer(all, one, all->ends + e)) return PACKET;
        }
        int64_t waited = now_ns() - begin, left = came ? 0 : all->ms - waited / 1000000;
        if (!came && waited < all->spin.limit) continue;
        if (left < 0) return QUIET;
        /* what else there is gets its turn behind each question */
        int ready = poll(came ? files + all->end_count : files, (nfds_t)(came ? all->other_count : count), (int)left);
        if (ready < 0 && errno != EINTR) return READY;
        for (int64_t i = came ? 0 : all->end_count; ready > 0 && i < (came ? all->other_count : count); i++)
            if ((came ? files + all->end_count : files)[i].revents) return READY;
        if (!came && ready == 0) return QUIET;
        slept = !came;
        if (came) begin = now_ns();
    }
}

/* What is known is no longer true. From any thread. */
void zoo_change(_Atomic int64_t *stamp) { atomic_fetch_add(stamp, 1); }
#else
/* Elsewhere no half has such attention. */
static int attend_half_away(const struct half *half, const struct step *step, int threads)
{
    (void)half, (void)step, (void)threads;
    return 1;
}
#endif
