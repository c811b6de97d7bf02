/* The steps of a ring: every access of its words, spinning, sleeping, copying and announcing.
 *
 * kvplug_shm/ring/protocol.py describes the protocol. What an unusual case means (an end that has ended, an impossible
 * word) is left to Python: the functions that move bytes return early then.
 *
 * Loads acquire and stores release, so that nothing here depends on a processor's order of stores.
 */

#define _GNU_SOURCE
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel compares the first half of a word, which must be the low one"
#endif

#ifndef LINE
#define LINE 64
#endif
#define HEAD 0
#define WRITER_ASLEEP 1
#define JUMP 5 /* of a ring with one reader */
#define OVER 1
#define FUTEX_WAIT 0
#define FUTEX_WAKE 1
#define IMPLAUSIBLE (-1)
/* Spins between two reads of the clock, and how long to spin before yielding the processor. */
#define LOOKS 16
#define LONELY_NS 2000

/* A message of half the last-level cache or more, within these limits, is stored past the caches: see `stream`.
 * Smaller ones fit there beside their source. Of blocks, half as many bytes are enough: a processor does not fetch
 * the next lines in advance where they are scattered. Exempt are runs shorter than `STREAM_UNALIGNED` that are no whole
 * lines. Measured on an AMD EPYC (32 MiB of L3) and an Intel Xeon (480 MiB, shared with other machines). */
#define STREAM_FROM_LEAST (4 << 20)
#define STREAM_FROM_MOST (32 << 20)
#define STREAM_UNALIGNED 2048

/* A reader of so many bytes or more does not share a processor with the writer: see `leave_processor`. And only in
 * a message with so many bytes to go does the writer spin for long enough to judge the reader: see `widen`. */
#define APART_FROM (1 << 20)

/* After so many laps in which the writer did not wait for long, it uses half as many places again. */
#define CALM_LAPS 64

typedef _Atomic uint64_t word_t;
typedef _Atomic uint32_t hint_t;

/* One end of a ring. Only `count` and the members from `window` on change. */
struct end {
    unsigned char *words;
    unsigned char *bytes;
    uint64_t places;
    uint64_t count;    /* of units sent or read */
    int64_t readers;   /* of the writing end: the number of readers; of a reading end: its index */
    /* Of a pipe. A message of `at_once` bytes or fewer is copied in one step; others in steps of these sizes, where a
     * reading end has no smallest one. */
    int64_t at_once, smallest, largest;
    /* Of the writing end of a pipe. Behind the first `window` places it jumps to the ring's first one. */
    uint64_t window;
    uint64_t least_window; /* to which it shrinks again */
    uint64_t jump;         /* the count at its last jump, or 0 */
    uint64_t calm_laps;    /* since it waited for long */
};

#define MAX_AXES 4

/* The memory of a message's bytes: from `flat` on, or the rows `ids` of one layer after the other. A layer has
 * `num_parts` arrays, and a row of each comes before the next id. A row is made of contiguous runs, which lie in axes.
 * The axis with the longest steps in memory comes first, so that memory is accessed in its own order; in the message
 * their order may be another one. All sizes and steps are bytes. */
struct span {
    unsigned char *flat;
    unsigned char **bases;
    const int64_t *strides; /* from one row of an array to the next */
    const int64_t *ids;
    int64_t num_ids;
    int64_t num_parts;
    int64_t row_bytes;
    int64_t run_bytes;
    int64_t num_axes; /* 0: a row is one run */
    int64_t slowest;  /* the axis with the longest steps in the message */
    int64_t counts[MAX_AXES];
    int64_t steps[MAX_AXES];
    int64_t in_message[MAX_AXES];
};

/* The common part of all small messages of one shape and dtype. */
struct message {
    const char *prefix;
    int64_t prefix_bytes; /* whole lines */
    int64_t nbytes;
    int64_t cost; /* its cost in the window while it is unread */
};

/* The accesses of words. The explorer of the tests has others, which it records. */
#ifdef RING_MEMORY
#include RING_MEMORY
#else
static word_t *word_at(unsigned char *words, int64_t word) {
    return (word_t *)(words + word * LINE);
}

static uint64_t load_word(unsigned char *words, int64_t word) {
    return atomic_load_explicit(word_at(words, word), memory_order_acquire);
}

static void store_word(unsigned char *words, int64_t word, uint64_t value) {
    atomic_store_explicit(word_at(words, word), value, memory_order_release);
}

/* Earlier stores are visible to all before any later load. */
static void fence(void) { atomic_thread_fence(memory_order_seq_cst); }

/* Sleep until woken, for `nap_ns` at most, unless the low half of the word differs from that of `seen`. The kernel
 * compares it after all stores of this thread are visible. May return without a reason. */
static void sleep_on(unsigned char *words, int64_t word, uint64_t seen, int64_t nap_ns) {
    struct timespec nap = {nap_ns / 1000000000, nap_ns % 1000000000};
    syscall(SYS_futex, words + word * LINE, FUTEX_WAIT, (uint32_t)seen, &nap, NULL, 0);
}

static void wake(unsigned char *words, int64_t word) {
    syscall(SYS_futex, words + word * LINE, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
#endif

static uint64_t load(const struct end *end, int64_t word) { return load_word(end->words, word); }

static int64_t tail(int64_t reader) { return 2 + 3 * reader; }
static int64_t asleep(int64_t reader) { return 3 + 3 * reader; }
static int64_t evicted(int64_t reader) { return 4 + 3 * reader; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static uint64_t lines(uint64_t nbytes) { return (nbytes + LINE - 1) & ~(uint64_t)(LINE - 1); }

/* Where the writer runs: 0 if unknown, else the processor's number plus 1. It lies beside a word that the writer
 * stores, and is no part of the protocol: a wrong value costs a reader one needless move. */
static hint_t *writers_processor(const struct end *end) {
    return (hint_t *)(end->words + WRITER_ASLEEP * LINE + sizeof(word_t));
}

static void note_processor(const struct end *end) {
    atomic_store_explicit(writers_processor(end), (uint32_t)sched_getcpu() + 1, memory_order_relaxed);
}

/* Move this thread away from the processor that the writer uses. Returns whether it did.
 *
 * In a virtual machine the kernel may take an idle processor for one that the host has taken away, and wakes a
 * reader on the processor of the writer that wakes it. The two then copy in turns until the scheduler balances its
 * queues, which takes longer than a copy of 16 MiB. Excluding the processor and allowing it again moves the thread
 * at once. A thread that is bound to some of the processors is left alone. */
static int leave_processor(const struct end *end) {
    int here = sched_getcpu();
    if (here < 0 || atomic_load_explicit(writers_processor(end), memory_order_relaxed) != (uint32_t)here + 1)
        return 0;
    cpu_set_t others;
    if (sched_getaffinity(0, sizeof others, &others) || CPU_COUNT(&others) < 2 ||
        CPU_COUNT(&others) < sysconf(_SC_NPROCESSORS_ONLN))
        return 0;
    CPU_CLR(here, &others);
    if (sched_setaffinity(0, sizeof others, &others))
        return 0;
    memset(&others, 0xff, sizeof others);
    sched_setaffinity(0, sizeof others, &others);
    return 1;
}

/* Store the word that other ends wait for, and wake the sleeping ones: `count` of them, every third word. */
static void announce(struct end *end, int64_t word, uint64_t value, int64_t first, int64_t count) {
    store_word(end->words, word, value);
    fence();
    for (int64_t each = 0; each < count; each++)
        if (load(end, first + 3 * each)) {
            wake(end->words, word);
            return;
        }
}

/* Sleep until `word` differs from `seen`; `own` is the word that shows that this end sleeps. Nothing sleeps on the word
 * of an end that has ended: evicting that end would not change the word. */
static void park(struct end *end, int64_t word, uint64_t seen, int64_t own, int64_t nap_ns) {
    if (seen & OVER || nap_ns <= 0)
        return;
    store_word(end->words, own, 1);
    sleep_on(end->words, word, seen, nap_ns);
    store_word(end->words, own, 0);
}

/* For words beside those of this protocol, and for Python's messages about an end. */
uint64_t kvplug_load(unsigned char *words, int64_t word) { return load_word(words, word); }

void kvplug_store(unsigned char *words, int64_t word, uint64_t value) {
    store_word(words, word, value);
    fence();
    wake(words, word);
}

void kvplug_wait(unsigned char *words, int64_t word, uint64_t seen, int64_t nap_ns) {
    sleep_on(words, word, seen, nap_ns);
}

void kvplug_wake(unsigned char *words, int64_t word) { wake(words, word); }

/* The checksum of this file at build time: Python does not use a build of another version. */
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0
#endif
uint32_t kvplug_source(void) { return SOURCE_CRC32; }

void kvplug_publish(struct end *end, uint64_t count) {
    end->count += count;
    announce(end, HEAD, end->count << 1, asleep(0), end->readers);
}

void kvplug_release(struct end *end, uint64_t count) {
    end->count += count;
    announce(end, tail(end->readers), end->count << 1, WRITER_ASLEEP, 1);
}

/* An end announces that it publishes, or reads, nothing more. */
void kvplug_end_writing(struct end *end) {
    announce(end, HEAD, end->count << 1 | OVER, asleep(0), end->readers);
}

void kvplug_end_reading(struct end *end) {
    announce(end, tail(end->readers), end->count << 1 | OVER, WRITER_ASLEEP, 1);
}

/* The writer never waits for this reader again. It may be alive, and store its tail once more. The fence of `announce`
 * keeps later stores into the reader's places behind the store of `evicted`: a release alone would not. */
void kvplug_evict(struct end *end, int64_t reader) {
    store_word(end->words, evicted(reader), 1);
    announce(end, tail(reader), load(end, tail(reader)) | OVER, WRITER_ASLEEP, 1);
}

/* A reader marks the writer as ended: no more units than the published ones. */
void kvplug_evict_writer(struct end *end) {
    announce(end, HEAD, load(end, HEAD) | OVER, asleep(end->readers), 1);
}

/* Whether the writer has evicted this reader; after that, bytes that were copied before may be of a later unit. */
int kvplug_evicted(const struct end *end) {
    atomic_thread_fence(memory_order_acquire); /* the copy's loads come before */
    return load(end, evicted(end->readers)) != 0;
}

/* Units that can be written; in a ring without readers all of them. */
static int64_t room_of(const struct end *end) {
    uint64_t room = end->places;
    for (int64_t reader = 0; reader < end->readers; reader++) {
        uint64_t seen = load(end, tail(reader));
        if (seen & OVER)
            continue;
        uint64_t left = end->places - (end->count - (seen >> 1));
        if (left < room || left > end->places) {
            if (load(end, evicted(reader)))
                continue;
            if (left > end->places)
                return IMPLAUSIBLE;
            room = left;
        }
    }
    return (int64_t)room;
}

/* Units that have arrived. */
static int64_t available_to(const struct end *end) {
    uint64_t units = (load(end, HEAD) >> 1) - end->count;
    if (units > INT64_MAX)
        return 0; /* the writer has ended in the middle of a unit */
    if (units > end->places)
        return load(end, evicted(end->readers)) ? (int64_t)end->places : IMPLAUSIBLE;
    return (int64_t)units;
}

/* The units of a jump at `count`: all up to the ring's end. */
static uint64_t jump_at(const struct end *end, uint64_t count) {
    uint64_t at = count % end->places;
    return at ? end->places - at : 0;
}

/* The units that the writer leaves out before the next ones. */
static uint64_t gap_of(const struct end *end) {
    return end->count % end->places < end->window ? 0 : jump_at(end, end->count);
}

/* Units that the writer can publish with this room, without the ones it leaves out. */
static int64_t usable_of(const struct end *end, int64_t room) {
    int64_t at = end->count % end->places, window = end->window;
    int64_t before = at < window ? window - at : 0, behind = room - ((int64_t)end->places - at);
    behind = behind < window ? behind : window;
    return (before < room ? before : room) + (behind > 0 ? behind : 0);
}

/* Units that the reader has not released, without the ones that were left out. */
static int64_t unread_of(const struct end *end, int64_t room) {
    uint64_t unread = end->places - (uint64_t)room, jumped = end->count - end->jump;
    return (int64_t)(unread < jumped ? unread : unread - jump_at(end, end->jump));
}

/* Publish units. Those before them that were left out count as published, too. */
static void publish_behind(struct end *end, uint64_t gap, uint64_t count) {
    if (end->count % end->places + gap + count >= end->places && ++end->calm_laps >= CALM_LAPS) {
        end->calm_laps = 0;
        uint64_t half = end->window / 2 & -(uint64_t)LINE;
        end->window = half > end->least_window ? half : end->least_window;
    }
    if (gap) {
        end->jump = end->count;
        store_word(end->words, JUMP, end->jump);
    }
    kvplug_publish(end, gap + count);
}

/* Whether the reader copies a large message now, or would if it had a processor. It lies beside a word that the reader
 * stores, and is no part of the protocol: a wrong value costs memory, or time. */
static hint_t *is_copying(const struct end *end, int64_t reader) {
    return (hint_t *)(end->words + tail(reader) * LINE + sizeof(word_t));
}

/* Use more places, after waiting for the reader of a ring. Returns whether this makes room at once.
 *
 * A reader in the middle of a copy that makes no room is waiting for a processor. One that is not copying may have
 * nothing to receive for yet, and more memory would not help it. */
static int widen(struct end *end) {
    end->calm_laps = 0;
    if (!atomic_load_explicit(is_copying(end, 0), memory_order_relaxed))
        return 0;
    uint64_t gap = gap_of(end);
    end->window = 2 * end->window < end->places ? 2 * end->window : end->places;
    return gap_of(end) < gap;
}

/* Units that have arrived in places one after the other, behind `*skip` of them, which grows by those left out. */
static int64_t arrived(const struct end *end, uint64_t *skip) {
    int64_t units = available_to(end);
    uint64_t before = load(end, JUMP) - end->count;
    if (units > 0 && before < (uint64_t)units && before >= *skip) {
        uint64_t gap = jump_at(end, end->count + before);
        if ((before - *skip) % LINE || (uint64_t)units - before < gap + LINE) {
            if (!load(end, evicted(end->readers)))
                return IMPLAUSIBLE;
        } else if (before > *skip) {
            return (int64_t)(before - *skip);
        } else {
            *skip += gap;
        }
    }
    return units < 0 || (uint64_t)units > *skip ? units - (int64_t)*skip : 0;
}

/* Units that have arrived in places one after the other. Passes over those left out before them. */
static int64_t arrived_next(struct end *end) {
    uint64_t skip = 0;
    int64_t units = arrived(end, &skip);
    end->count += skip;
    return units;
}

/* Whether a reader has ended, or was evicted: nothing is written for it any more. */
static int no_reader_left(const struct end *end) {
    for (int64_t reader = 0; reader < end->readers; reader++)
        if (!(load(end, tail(reader)) & OVER) && !load(end, evicted(reader)))
            return 0;
    return 1;
}

struct patience {
    int64_t until_ns;
    int64_t lonely_ns;
    unsigned looks;
};

static struct patience patience_of(int64_t spin_ns) {
    int64_t now = spin_ns > 0 ? now_ns() : 0;
    struct patience patience = {now + spin_ns, now + LONELY_NS, 0};
    return patience;
}

/* Pause between two spins; 0: the time is over. */
static int look_again(struct patience *patience, int64_t spin_ns) {
    if (spin_ns <= 0)
        return 0;
    pause_briefly();
    if (++patience->looks % LOOKS)
        return 1;
    int64_t now = now_ns();
    if (now >= patience->lonely_ns)
        sched_yield(); /* the other end may wait for this processor */
    return now < patience->until_ns;
}

int64_t kvplug_room(const struct end *end) { return room_of(end); }

int64_t kvplug_available(const struct end *end) { return available_to(end); }

int64_t kvplug_gap(const struct end *end) { return (int64_t)gap_of(end); }

/* The bytes of a pipe's ring that its reader has not released. */
int64_t kvplug_unread(const struct end *end) {
    int64_t room = room_of(end);
    return room < 0 ? IMPLAUSIBLE : unread_of(end, room);
}

static int have_arrived(const struct end *end, uint64_t seen, int64_t count) {
    return (int64_t)((seen >> 1) - end->count) >= count;
}

/* The writer's word, after spinning for `spin_ns` for `count` units. */
static uint64_t look_for_units(const struct end *end, int64_t count, int64_t spin_ns) {
    struct patience patience = patience_of(spin_ns);
    for (;;) {
        uint64_t seen = load(end, HEAD);
        if (have_arrived(end, seen, count) || seen & OVER || !look_again(&patience, spin_ns))
            return seen;
    }
}

/* Whether `count` units can be read, after spinning for `spin_ns`. */
static int spin_for_units(const struct end *end, int64_t count, int64_t spin_ns) {
    return have_arrived(end, look_for_units(end, count, spin_ns), count);
}

/* The same; if not, sleep once for `nap_ns` at most. */
static int sleep_for_units(struct end *end, int64_t count, int64_t spin_ns, int64_t nap_ns) {
    uint64_t seen = look_for_units(end, count, spin_ns);
    if (have_arrived(end, seen, count))
        return 1;
    park(end, HEAD, seen, asleep(end->readers), nap_ns);
    return 0;
}

/* Whether `count` units can be read, after spinning for `spin_ns` and one sleep of `nap_ns` at most. */
int kvplug_poll_units(struct end *end, int64_t count, int64_t spin_ns, int64_t nap_ns) {
    return sleep_for_units(end, count, spin_ns, nap_ns) || (nap_ns > 0 && have_arrived(end, load(end, HEAD), count));
}

/* Whether `count` units can be written, after spinning for `spin_ns`. */
static int spin_for_room(const struct end *end, int64_t count, int64_t spin_ns) {
    struct patience patience = patience_of(spin_ns);
    for (;;) {
        int64_t room = room_of(end);
        if (room >= count || room < 0)
            return 1;
        if (!look_again(&patience, spin_ns))
            return 0;
    }
}

/* The word of a reader that must change before `count` units can be written, and its value; -1: they can. */
int64_t kvplug_blocked_on(const struct end *end, int64_t count, uint64_t *seen) {
    for (int64_t reader = 0; reader < end->readers; reader++) {
        *seen = load(end, tail(reader));
        int64_t unread = (int64_t)(end->count + (uint64_t)count - (*seen >> 1));
        if (unread > (int64_t)end->places && !(*seen & OVER) && !load(end, evicted(reader)))
            return tail(reader);
    }
    return -1;
}

/* Whether `count` units can be written, after spinning for `spin_ns`; if not, sleep once for `nap_ns` at most. */
static int sleep_for_room(struct end *end, int64_t count, int64_t spin_ns, int64_t nap_ns) {
    uint64_t seen;
    if (spin_ns > 0 && spin_for_room(end, count, spin_ns))
        return 1;
    int64_t word = kvplug_blocked_on(end, count, &seen);
    if (word < 0)
        return 1;
    park(end, word, seen, WRITER_ASLEEP, nap_ns);
    return 0;
}

/* Whether `count` units can be written, after spinning for `spin_ns` and one sleep of `nap_ns` at most. 1 too if a
 * reader's word is impossible. */
int kvplug_poll_room(struct end *end, int64_t count, int64_t spin_ns, int64_t nap_ns) {
    uint64_t seen;
    return sleep_for_room(end, count, spin_ns, nap_ns) || (nap_ns > 0 && kvplug_blocked_on(end, count, &seen) < 0);
}

/* memcpy with non-temporal stores: the target's lines are not read from memory before they are overwritten, which
 * is a third of the traffic of a copy larger than the caches, and the ring stays in them. A store fence must follow
 * before another thread uses the target. */
static inline void stream(void *target, const void *source, uint64_t nbytes) {
#if defined(__SSE2__)
    unsigned char *to = target;
    const unsigned char *from = source;
    uint64_t head = -(uintptr_t)to & (LINE - 1), done = 0;
    if (head || nbytes % LINE) {
        if (nbytes < STREAM_UNALIGNED) {
            memcpy(to, from, nbytes);
            return;
        }
        memcpy(to, from, head);
        done = head;
    }
    for (; done + LINE <= nbytes; done += LINE) {
        const __m128i *in = (const __m128i *)(from + done);
        __m128i *out = (__m128i *)(to + done);
        __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    if (done < nbytes)
        memcpy(to + done, from + done, nbytes - done);
#else
    memcpy(target, source, nbytes);
#endif
}

/* The size of a message from which it is worth it. */
static int64_t stream_from(void) {
    static _Atomic int64_t known;
    int64_t from = atomic_load_explicit(&known, memory_order_relaxed);
    if (!from) {
#ifdef _SC_LEVEL3_CACHE_SIZE
        from = sysconf(_SC_LEVEL3_CACHE_SIZE) / 2; /* 0 or -1: unknown */
#endif
        from = from < STREAM_FROM_LEAST ? STREAM_FROM_LEAST : from;
        from = from > STREAM_FROM_MOST ? STREAM_FROM_MOST : from;
        atomic_store_explicit(&known, from, memory_order_relaxed);
    }
    return from;
}

static void stream_fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Copy a message that is one of `copies` of as many bytes: past the caches, if they do not fit there together. */
void kvplug_copy_one_of(void *target, const void *source, int64_t nbytes, int64_t copies) {
    if (nbytes < stream_from() / copies) {
        memcpy(target, source, nbytes);
        return;
    }
    stream(target, source, nbytes);
    stream_fence();
}

enum way { GATHER, SCATTER, SCATTER_STREAM };

/* Inlined wherever it is called, so that each `way` has loops of its own. */
#define EACH_WAY static inline __attribute__((always_inline))

/* Contiguous bytes, to or from the ring. */
EACH_WAY void move(unsigned char *memory, unsigned char *ring, int64_t nbytes, enum way way) {
    if (way == GATHER)
        memcpy(ring, memory, nbytes);
    else if (way == SCATTER)
        memcpy(memory, ring, nbytes);
    else
        stream(memory, ring, nbytes);
}

/* The same for a part of a row, run by run in the order of the message. */
EACH_WAY void move_runs(const struct span *span, unsigned char *row, int64_t skip, unsigned char *ring,
                        int64_t nbytes, enum way way) {
    while (nbytes > 0) {
        int64_t in_run = skip % span->run_bytes, count = span->run_bytes - in_run, offset = in_run;
        count = count < nbytes ? count : nbytes;
        for (int64_t axis = 0; axis < span->num_axes; axis++)
            offset += skip / span->in_message[axis] % span->counts[axis] * span->steps[axis];
        move(row + offset, ring, count, way);
        skip += count;
        ring += count;
        nbytes -= count;
    }
}

/* The same for `num_slabs` whole steps of the slowest axis, in the order of memory. `run_bytes` are the span's. */
EACH_WAY void move_slabs_of(int64_t run_bytes, const struct span *span, unsigned char *memory, unsigned char *ring,
                            int64_t num_slabs, enum way way) {
    int64_t at[MAX_AXES] = {0}, counts[MAX_AXES], last = span->num_axes - 1, axis = 0;
    memcpy(counts, span->counts, sizeof counts);
    counts[span->slowest] = num_slabs;
    while (axis >= 0) {
        for (int64_t each = 0; each < counts[last]; each++)
            move(memory + each * span->steps[last], ring + each * span->in_message[last], run_bytes, way);
        for (axis = last - 1; axis >= 0; axis--) {
            memory += span->steps[axis];
            ring += span->in_message[axis];
            if (++at[axis] < counts[axis])
                break;
            memory -= at[axis] * span->steps[axis];
            ring -= at[axis] * span->in_message[axis];
            at[axis] = 0;
        }
    }
}

/* The same. The runs of usual heads are moved without a call. */
EACH_WAY void move_slabs(const struct span *span, unsigned char *memory, unsigned char *ring, int64_t num_slabs,
                         enum way way) {
    switch (span->run_bytes) {
    case 64: move_slabs_of(64, span, memory, ring, num_slabs, way); break;
    case 128: move_slabs_of(128, span, memory, ring, num_slabs, way); break;
    case 256: move_slabs_of(256, span, memory, ring, num_slabs, way); break;
    default: move_slabs_of(span->run_bytes, span, memory, ring, num_slabs, way);
    }
}

/* The `nbytes` of a row from byte `skip` on. */
EACH_WAY void move_row(const struct span *span, unsigned char *row, int64_t skip, unsigned char *ring,
                       int64_t nbytes, enum way way) {
    if (!span->num_axes) {
        move(row + skip, ring, nbytes, way);
        return;
    }
    int64_t slab = span->in_message[span->slowest], head = (slab - skip % slab) % slab;
    head = head < nbytes ? head : nbytes;
    int64_t whole = (nbytes - head) / slab, end = head + whole * slab;
    move_runs(span, row, skip, ring, head, way);
    if (whole)
        move_slabs(span, row + (skip + head) / slab * span->steps[span->slowest], ring + head, whole, way);
    move_runs(span, row, skip + end, ring + end, nbytes - end, way);
}

/* The `nbytes` of a message from byte `done` on. */
EACH_WAY void move_span(const struct span *span, int64_t done, unsigned char *ring, int64_t nbytes, enum way way) {
    if (span->flat) {
        move(span->flat + done, ring, nbytes, way);
        return;
    }
    int64_t row = done / span->row_bytes, skip = done % span->row_bytes;
    int64_t part = row % span->num_parts, at = row / span->num_parts % span->num_ids;
    int64_t first = row / span->num_parts / span->num_ids * span->num_parts; /* array of this layer */
    while (nbytes > 0) {
        int64_t count = span->row_bytes - skip < nbytes ? span->row_bytes - skip : nbytes;
        unsigned char *memory = span->bases[first + part] + span->strides[first + part] * span->ids[at];
        move_row(span, memory, skip, ring, count, way);
        ring += count;
        nbytes -= count;
        skip = 0;
        if (++part < span->num_parts)
            continue;
        part = 0;
        if (++at == span->num_ids) {
            at = 0;
            first += span->num_parts;
        }
    }
}

/* The same, at place `at` of the ring, around its end. */
EACH_WAY void move_around(const struct end *end, uint64_t at, const struct span *span, int64_t done, int64_t nbytes,
                          enum way way) {
    int64_t first = end->places - at;
    first = first < nbytes ? first : nbytes;
    if (first)
        move_span(span, done, end->bytes + at, first, way);
    if (first < nbytes)
        move_span(span, done + first, end->bytes, nbytes - first, way);
}

static void gather(const struct end *end, uint64_t at, const struct span *span, int64_t done, int64_t nbytes) {
    move_around(end, at, span, done, nbytes, GATHER);
}

static void scatter(const struct end *end, uint64_t at, const struct span *span, int64_t done, int64_t nbytes) {
    move_around(end, at, span, done, nbytes, SCATTER);
}

static void scatter_stream(const struct end *end, uint64_t at, const struct span *span, int64_t done,
                           int64_t nbytes) {
    move_around(end, at, span, done, nbytes, SCATTER_STREAM);
    stream_fence();
}

/* Whether there is room for a whole message now, with `limit` units unread at most. */
static int fits(const struct end *end, const struct message *message, int64_t limit) {
    int64_t room = room_of(end);
    if (room < 0)
        return IMPLAUSIBLE;
    if (usable_of(end, room) < message->prefix_bytes + (int64_t)lines(message->nbytes))
        return 0;
    int64_t unread = unread_of(end, room);
    return unread ? unread + message->cost <= limit : !no_reader_left(end);
}

/* How many units have arrived in places one after the other, after spinning for `spin_ns` for a line, and a copy of
 * that line. */
int64_t kvplug_peek(struct end *end, void *line, int64_t spin_ns) {
    if (spin_ns > 0)
        spin_for_units(end, LINE, spin_ns);
    int64_t here = arrived_next(end);
    if (here >= LINE)
        memcpy(line, end->bytes + end->count % end->places, LINE);
    return here;
}

/* Copy the `nbytes` after the first line, and release line and bytes. They must have arrived. */
void kvplug_take(struct end *end, void *target, int64_t nbytes) {
    struct span span = {.flat = target};
    scatter(end, (end->count + LINE) % end->places, &span, 0, nbytes);
    kvplug_release(end, LINE + lines(nbytes));
}

/* Write as much of a message, from byte `done` of `nbytes` on, as the peer makes room for.
 *
 * A prefix, if any, goes before it. The steps are short at the beginning and towards the end, when the other end
 * waits for one. Returns the number of the message's own bytes: fewer if it had to wait for longer than `spin_ns`,
 * after `most_ns`, and when the reader has ended. */
int64_t kvplug_push(struct end *end, const char *prefix, int64_t prefix_bytes, const struct span *span,
                    int64_t done, int64_t nbytes, int64_t spin_ns, int64_t most_ns) {
    struct span before = {.flat = (unsigned char *)prefix};
    int64_t smallest = nbytes <= end->at_once ? nbytes : end->smallest;
    int64_t begun = done, stop_ns = now_ns() + most_ns;
    while (prefix_bytes || done < nbytes) {
        if (nbytes - done >= APART_FROM)
            note_processor(end);
        int64_t least = prefix_bytes ? prefix_bytes : LINE, room = room_of(end) & -(int64_t)LINE;
        int64_t gap = gap_of(end);
        if (room < gap + least) {
            if (room < 0 || spin_ns <= 0)
                break;
            if (!spin_for_room(end, gap + least, spin_ns) && (nbytes - done < APART_FROM || !widen(end)))
                break;
            /* A reader that shows room and withdraws it must not hold this call. */
            if (now_ns() >= stop_ns)
                break;
            continue;
        }
        if (no_reader_left(end))
            break;
        int64_t left = nbytes - done, step = done ? (left / 4) & -(int64_t)LINE : 0;
        step = step < end->largest ? step : end->largest;
        step = step > smallest ? step : smallest;
        step = step < left ? step : left;
        uint64_t at = (end->count + gap) % end->places;
        room -= gap;
        if (step < nbytes) /* the only step of a message may reach beyond the window */
            room = room < (int64_t)(end->window - at) ? room : (int64_t)(end->window - at);
        room = room > prefix_bytes ? room : prefix_bytes;
        step = step < room - prefix_bytes ? step : room - prefix_bytes;
        if (prefix_bytes)
            gather(end, at, &before, 0, prefix_bytes);
        gather(end, (at + prefix_bytes) % end->places, span, done, step);
        if (no_reader_left(end))
            break; /* the reader was evicted meanwhile: the transfer fails */
        publish_behind(end, gap, prefix_bytes + lines(step));
        prefix_bytes = 0;
        done += step;
        if (done < nbytes && now_ns() >= stop_ns)
            break;
    }
    return done - begun;
}

/* Publish a whole message, if it fits, in pieces, so that the other end begins to read a large one meanwhile. Returns
 * whether it was published; 0 too if the reader was evicted in the middle. */
int kvplug_put(struct end *end, const struct message *message, const void *source, int64_t limit) {
    int there = fits(end, message, limit);
    if (there == 1) {
        struct span span = {.flat = (unsigned char *)source};
        int64_t sent = kvplug_push(end, message->prefix, message->prefix_bytes, &span, 0, message->nbytes,
                                   0, INT64_MAX / 2);
        there = sent == message->nbytes;
    }
    return there;
}

/* Take as much of a message, from byte `done` of `nbytes` on, as arrives, and at least `enough` bytes of it.
 *
 * `unreleased` units before it were read already and are released with the first step. Returns the number of bytes:
 * fewer if it had to wait for longer than `spin_ns`, after `most_ns`, and when the writer has ended; IMPLAUSIBLE before
 * the first of them. */
int64_t kvplug_pull(struct end *end, const struct span *span, int64_t done, int64_t nbytes, int64_t enough,
                    int64_t unreleased, int64_t spin_ns, int64_t most_ns) {
    int64_t begun = done, stop_ns = now_ns() + most_ns, step = 0;
    int moved = 0, streams = nbytes >= (span->flat ? stream_from() : stream_from() / 2);
    atomic_store_explicit(is_copying(end, end->readers), 1, memory_order_relaxed);
    while (done < enough) {
        uint64_t skip = unreleased;
        int64_t left = nbytes - done;
        step = arrived(end, &skip);
        if (step < 0)
            break;
        if (!moved && left >= APART_FROM)
            moved = leave_processor(end);
        step = step < end->largest ? step : end->largest;
        step = step < left ? step : left;
        if (step < left)
            step &= -(int64_t)LINE;
        if (step <= 0) {
            /* A writer that shows units and withdraws them must not hold this call. */
            if (spin_ns <= 0 || !spin_for_units(end, unreleased + LINE, spin_ns) || now_ns() >= stop_ns)
                break;
            continue;
        }
        (streams ? scatter_stream : scatter)(end, (end->count + skip) % end->places, span, done, step);
        kvplug_release(end, skip + lines(step));
        unreleased = 0;
        done += step;
        if (done < nbytes && now_ns() >= stop_ns)
            break;
    }
    atomic_store_explicit(is_copying(end, end->readers), 0, memory_order_relaxed);
    return step < 0 && done == begun ? IMPLAUSIBLE : done - begun;
}
