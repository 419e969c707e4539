/* The threads that run the kernels' parallel regions, included by kernels.c.
 *
 * gcc turns `#pragma omp` into calls of the functions at the end of this file (the ABI of libgomp). Defining them here,
 * with hidden visibility and a library linked without libgomp (build.py), gives the kernels threads of their own.
 * torch's operations keep libgomp's. They differ from libgomp's in these ways, because a core may be shared with other
 * work:
 *
 *     optional    every loop of a region is cut into chunks, which threads take as they go. A region needs no thread but
 *                 its caller: the others join while chunks are left, and a thread that is asleep or descheduled when the
 *                 region begins, or that could not be created, is not waited for. A waiting thread waits for chunks that
 *                 others have taken, not for threads.
 *     bounded     a thread that waits spins for a bounded time, then sleeps until it is woken, so that the core is free
 *                 for the thread that it waits for. The limit is a moving estimate: it grows while waits end within
 *                 it, and shrinks when waits outlive it (`adapt`).
 *
 *     alone      where a caller loses a good part of its time to waiting for descheduled threads, it runs without them for a
 *                while. On shared cores one thread that always runs does more than several that wait for each other.
 *
 * So only loops with schedule(dynamic) exist: a static one needs all threads. The library does not link with one, as
 * with any other construct that is not defined here, and then the build takes libgomp.
 *
 * Each calling thread has a team of its own, made at its first region and ended with it. A region inside a region runs
 * on its caller alone. After a fork the child makes new teams. Which thread takes which chunk does not change results:
 * a chunk computes whole rows or panels.
 */
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE __attribute__((aligned(128)))
#define FOR_GCC __attribute__((visibility("hidden")))

enum { MOST_WORKERS = 1023 };

/* The low bit of a word that threads wait on is set while one sleeps on it. */
#define SLEEPER 1u
/* `gate`: whether workers may join the region; above it, the number of workers inside. */
#define OPEN 2u
#define ONE_INSIDE 4u
/* `done` and `epoch` count in steps of two, beside SLEEPER. */
#define ONE 2u

/* A caller that loses a quarter of WINDOW_NS within it runs alone for ALONE times the time lost, at most MOST_ALONE_NS.
 * WAKING_NS: longest time that waking a thread takes; no loss. A virtual machine's host takes its processors away for
 * moments, some percent of the time: that is less than the other threads give. */
enum { ALONE = 16, MOST_ALONE_NS = 200000000, WINDOW_NS = 40000000, WAKING_NS = 200000 };

/* How long waits of one kind spin, and the length of the last one that slept, in ns. */
struct patience {
    int64_t limit, slept;
};

/* Limits in ns, set before the first region (zoo_wait). */
static int64_t least_spin_ns = 5000, most_spin_ns = 100000;

struct loop {
    long start, step, end, share;
    uint32_t chunks;
};

struct team;

struct worker {
    struct team *team;
    pthread_t thread;
    uint32_t number;
};

struct team {
    _Atomic uint32_t epoch LINE; /* changes with every region */
    _Atomic uint32_t gate LINE;
    _Atomic uint64_t claim LINE; /* number of the loop that is being taken << 32 | its next chunk */
    _Atomic uint32_t done LINE;  /* chunks of this region that are done */
    void (*body)(void *) LINE;   /* set before the gate opens, with what follows */
    void *data;
    uint32_t wanted;
    struct loop first; /* of a combined `parallel for` */
    _Atomic bool ending;
    struct patience finish;
    int64_t chunk_ns;    /* the caller's time for a chunk of its last loop */
    int64_t alone_until; /* 0: the workers take part */
    int64_t window;      /* when the window of losses began */
    int64_t lost;        /* in this window, ns */
    uint32_t workers, forks;
    int left; /* one more than the processor that the workers keep off; 0: none */
    struct worker *members[MOST_WORKERS];
};

/* A thread's walk through a region. */
struct walk {
    struct team *team; /* NULL: it runs alone */
    bool inside;
    uint32_t number;   /* of the loop it is in */
    uint32_t before;   /* chunks of all loops up to this one */
    uint32_t taken;    /* chunks that it has done and not reported */
    bool leads;        /* it is the caller's */
    int64_t begun;     /* when it began the loop; the caller's only */
    struct loop loop;
    struct patience *patience;
};

static __thread struct walk walk;
static __thread struct team *own;
static _Atomic uint32_t forks;
static pthread_key_t ended_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ----------------------------------------------------------------------------------------------------------------- waiting */

INLINE void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_on(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

/* A wait that ended within its limit lengthens later ones. One that slept, but not for longer than a wait may spin, makes them
 * as long as itself; a longer one shortens them. */
static void adapt(struct patience *patience, int64_t length, bool slept)
{
    int64_t limit = patience->limit - patience->limit / 4;
    if (!slept) limit = patience->limit + patience->limit / 16 + 1;
    else if (length < most_spin_ns && limit < length) limit = length;
    patience->limit = limit < least_spin_ns ? least_spin_ns : limit > most_spin_ns ? most_spin_ns : limit;
}

/* Wait until `over(word, what)`: spin, then sleep. Whatever makes it true changes the word by an atomic operation that
 * returns the former value, and wakes sleepers if SLEEPER was set in it. */
INLINE uint32_t wait_for(_Atomic uint32_t *word, bool (*over)(uint32_t, uint32_t), uint32_t what, struct patience *patience)
{
    uint32_t value = atomic_load_explicit(word, memory_order_acquire);
    if (over(value, what)) return value;
    int64_t begin = now_ns();
    do {
        for (int i = 0; i < 8; i++) {
            relax();
            value = atomic_load_explicit(word, memory_order_acquire);
            if (over(value, what)) {
                adapt(patience, 0, false);
                return value;
            }
        }
    } while (now_ns() - begin < patience->limit);
    for (;;) {
        value = atomic_fetch_or(word, SLEEPER) | SLEEPER;
        if (over(value, what)) {
            patience->slept = now_ns() - begin;
            adapt(patience, patience->slept, true);
            return value;
        }
        sleep_on(word, value);
    }
}

INLINE bool another(uint32_t epoch, uint32_t seen) { return (epoch & ~SLEEPER) != seen; }
INLINE bool reached(uint32_t done, uint32_t count) { return (int32_t)((done >> 1) - count) >= 0; }
INLINE bool left_empty(uint32_t gate, uint32_t unused)
{
    (void)unused;
    return gate < ONE_INSIDE;
}

/* ------------------------------------------------------------------------------------------------------------------- teams */

static void walk_through(struct team *team, struct patience *patience, bool leads)
{
    struct walk outer = walk;
    walk = (struct walk){.team = team, .inside = true, .loop = team->first, .before = team->first.chunks, .patience = patience, .leads = leads};
    if (leads) walk.begun = now_ns();
    team->body(team->data);
    walk = outer;
}

static void *work(void *argument)
{
    struct worker *self = argument;
    struct team *team = self->team;
    struct patience idle = {.limit = most_spin_ns}, inside = {.limit = most_spin_ns};
    uint32_t seen = 0;
    for (;;) {
        seen = wait_for(&team->epoch, another, seen, &idle) & ~SLEEPER;
        if (atomic_load(&team->ending)) return NULL;
        uint32_t gate = atomic_load(&team->gate);
        while (gate & OPEN && !atomic_compare_exchange_weak(&team->gate, &gate, gate + ONE_INSIDE)) {}
        if (!(gate & OPEN)) continue; /* the region ended before this thread was there */
        seen = atomic_load(&team->epoch) & ~SLEEPER;
        if (self->number < team->wanted) walk_through(team, &inside, false);
        gate = atomic_fetch_sub(&team->gate, ONE_INSIDE);
        if (gate & SLEEPER && left_empty(gate - ONE_INSIDE, 0)) wake_all(&team->gate);
    }
}

static void end_team(void *ended)
{
    struct team *team = ended;
    if (team->forks == atomic_load(&forks)) {
        atomic_store(&team->ending, true);
        if (atomic_fetch_add(&team->epoch, ONE) & SLEEPER) wake_all(&team->epoch);
        for (uint32_t i = 0; i < team->workers; i++) pthread_join(team->members[i]->thread, NULL);
    } /* else the threads are the parent's */
    for (uint32_t i = 0; i < team->workers; i++) free(team->members[i]);
    free(team);
    own = NULL;
}

static void count_fork(void) { atomic_fetch_add(&forks, 1); }

static void set_up(void)
{
    pthread_key_create(&ended_key, end_team);
    pthread_atfork(NULL, NULL, count_fork);
}

/* Return the calling thread's team with `workers` threads, or as many as can be created; NULL without memory. */
static struct team *team_of(uint32_t workers)
{
    pthread_once(&once, set_up);
    if (own != NULL && own->forks != atomic_load(&forks)) end_team(own);
    if (own == NULL) {
        own = aligned_alloc(128, (sizeof(struct team) + 127) / 128 * 128);
        if (own == NULL) return NULL;
        memset(own, 0, sizeof(struct team));
        own->forks = atomic_load(&forks);
        own->finish.limit = most_spin_ns;
        pthread_setspecific(ended_key, own);
    }
    if (own->workers >= workers) return own;
    sigset_t all, before; /* signals are for the program's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (own->workers < workers && own->workers < MOST_WORKERS) {
        struct worker *made = malloc(sizeof *made);
        if (made == NULL) break;
        *made = (struct worker){.team = own, .number = own->workers};
        if (pthread_create(&made->thread, NULL, work, made) != 0) {
            free(made);
            break;
        }
        own->members[own->workers++] = made;
        own->left = 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return own;
}

/* Keep the workers, of which one sleeps, off the caller's processor: there they would wait for the caller, and then take
 * its time. The system wakes a thread beside its waker if it takes no other processor to be idle, and in a virtual machine
 * a processor that is idle looks like one that the host has taken away. */
static void keep_apart(struct team *team)
{
    int processor = sched_getcpu();
    if (processor < 0 || team->left == processor + 1) return;
    cpu_set_t others;
    if (sched_getaffinity(0, sizeof others, &others) != 0) return;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (uint32_t i = 0; i < team->workers; i++) pthread_setaffinity_np(team->members[i]->thread, sizeof others, &others);
    team->left = processor + 1;
}

/* Whether the caller still runs alone after a loss. */
static bool keeps_alone(struct team *team)
{
    if (team->alone_until == 0) return false;
    if (now_ns() < team->alone_until) return true;
    team->alone_until = 0;
    return false;
}

/* After a wait: if it slept for longer than another thread needs to finish its chunk, that one was descheduled. */
static void count_loss(struct team *team)
{
    int64_t lost = team->finish.slept - 2 * team->chunk_ns - WAKING_NS;
    team->finish.slept = 0;
    if (lost <= 0) return;
    int64_t now = now_ns();
    if (now - team->window > WINDOW_NS) {
        team->window = now - lost;
        team->lost = 0;
    }
    team->lost += lost;
    if (team->lost < WINDOW_NS / 4) return;
    int64_t alone = ALONE * team->lost;
    team->alone_until = now + (alone > MOST_ALONE_NS ? MOST_ALONE_NS : alone);
    team->lost = 0;
}

/* Run a region: on the caller, and on up to `threads` - 1 workers that join it. */
static void run_region(void (*body)(void *), void *data, unsigned threads, struct loop first)
{
    struct team *team = threads > 1 && !walk.inside ? team_of(threads - 1) : NULL;
    if (team == NULL || team->workers == 0 || keeps_alone(team)) {
        struct walk outer = walk;
        walk = (struct walk){.inside = true, .loop = first};
        body(data);
        walk = outer;
        return;
    }
    team->body = body;
    team->data = data;
    team->wanted = threads - 1;
    team->first = first;
    atomic_store_explicit(&team->claim, 0, memory_order_relaxed);
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    atomic_store(&team->gate, OPEN);
    uint32_t before = atomic_load_explicit(&team->epoch, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&team->epoch, &before, (before & ~SLEEPER) + ONE)) {}
    if (before & SLEEPER) {
        keep_apart(team);
        wake_all(&team->epoch);
    }
    walk_through(team, &team->finish, true);
    uint32_t gate = atomic_fetch_and(&team->gate, ~OPEN);
    if (!left_empty(gate & ~OPEN, 0)) {
        wait_for(&team->gate, left_empty, 0, &team->finish);
        if (team->finish.slept > 0) count_loss(team);
    }
}

/* ------------------------------------------------------------------------------------------------------------------- loops */

static struct loop loop_of(long start, long end, long step, long share)
{
    long count = step > 0 ? (end - start + step - 1) / step : (start - end - step - 1) / -step;
    if (count < 0) count = 0;
    if (share < 1) share = 1;
    if (count / share >= INT32_MAX / 4) share = count / (INT32_MAX / 8); /* chunks are counted in 30 bits */
    return (struct loop){start, step, end, share, (uint32_t)((count + share - 1) / share)};
}

/* Report the chunks that this thread has done. */
static void report(void)
{
    if (walk.taken == 0) return;
    if (walk.leads) walk.team->chunk_ns = (now_ns() - walk.begun) / walk.taken;
    uint32_t done = atomic_fetch_add(&walk.team->done, walk.taken * ONE);
    walk.taken = 0;
    if (done & SLEEPER) {
        atomic_fetch_and(&walk.team->done, ~SLEEPER);
        wake_all(&walk.team->done);
    }
}

/* Take the next chunk of this thread's loop; false if none is left. */
static bool take(long *from, long *until)
{
    struct loop *loop = &walk.loop;
    if (walk.team == NULL) { /* all at once */
        bool left = loop->chunks > 0;
        loop->chunks = 0;
        *from = loop->start;
        *until = loop->end;
        return left;
    }
    uint64_t claim = atomic_load_explicit(&walk.team->claim, memory_order_relaxed), next;
    do {
        uint32_t number = (uint32_t)(claim >> 32);
        next = number < walk.number ? 0 : (uint32_t)claim;
        if (number > walk.number || next >= loop->chunks) {
            report();
            return false;
        }
    } while (!atomic_compare_exchange_weak(&walk.team->claim, &claim, (uint64_t)walk.number << 32 | (next + 1)));
    walk.taken++;
    *from = loop->start + (long)next * loop->share * loop->step;
    *until = next + 1 == loop->chunks ? loop->end : *from + loop->share * loop->step;
    return true;
}

FOR_GCC void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
{
    (void)flags;
    run_region(body, data, threads, (struct loop){0});
}

FOR_GCC void GOMP_parallel_loop_nonmonotonic_dynamic(void (*body)(void *), void *data, unsigned threads, long start, long end, long step,
                                                            long share, unsigned flags)
{
    (void)flags;
    run_region(body, data, threads, loop_of(start, end, step, share));
}

FOR_GCC bool GOMP_loop_nonmonotonic_dynamic_next(long *from, long *until) { return take(from, until); }

FOR_GCC bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long share, long *from, long *until)
{
    walk.loop = loop_of(start, end, step, share);
    walk.number++;
    walk.before += walk.loop.chunks;
    if (walk.leads) walk.begun = now_ns();
    return take(from, until);
}

FOR_GCC void GOMP_loop_end_nowait(void) {}

/* Wait until all chunks of this loop and the ones before it are done. */
FOR_GCC void GOMP_loop_end(void)
{
    if (walk.team == NULL) return;
    wait_for(&walk.team->done, reached, walk.before, walk.patience);
    if (walk.leads && walk.patience->slept > 0) count_loss(walk.team);
}

/* Set the shortest and longest time that a waiting thread spins; both 0: it sleeps at once. */
void zoo_wait(int64_t least_ns, int64_t most_ns)
{
    least_spin_ns = least_ns;
    most_spin_ns = most_ns;
}
