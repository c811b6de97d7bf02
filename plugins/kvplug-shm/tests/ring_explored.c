/* The steps of ring.c for the explorer: each access of a word gets a recorded answer, or stops the call.
 *
 * Built with -DRING_C="path of ring.c" and -DRING_MEMORY="/dev/null". */

#define _GNU_SOURCE
#include <setjmp.h>
#include <stdint.h>

enum what { LOAD, STORE, FENCE, WAIT, WAKE };

/* The first access without an answer. */
struct {
    int64_t what, word;
    uint64_t value;
} explored_access;
int64_t explored_answers; /* how many were used */

static const uint64_t *answers;
static int64_t num_answers;
static jmp_buf stopped;

static uint64_t answered(enum what what, int64_t word, uint64_t value) {
    if (explored_answers < num_answers)
        return answers[explored_answers++];
    explored_access.what = what;
    explored_access.word = word;
    explored_access.value = value;
    longjmp(stopped, 1);
}

static uint64_t load_word(unsigned char *words, int64_t word) {
    (void)words;
    return answered(LOAD, word, 0);
}

static void store_word(unsigned char *words, int64_t word, uint64_t value) {
    (void)words;
    answered(STORE, word, value);
}

static void fence(void) {
#ifndef NO_FENCE
    answered(FENCE, 0, 0);
#endif
}

static void sleep_on(unsigned char *words, int64_t word, uint64_t seen, int64_t nap_ns) {
    (void)words, (void)nap_ns;
    answered(WAIT, word, seen);
}

static void wake(unsigned char *words, int64_t word) {
    (void)words;
    answered(WAKE, word, 0);
}

/* Units are counted singly. */
#define LINE 1
#include RING_C

#define STOPPED INT64_MIN

enum step {
    PUBLISH, RELEASE, END_WRITING, END_READING, EVICT, EVICT_WRITER, EVICTED, ROOM, AVAILABLE, POLL_ROOM, POLL_UNITS,
    PUBLISH_BEHIND, ARRIVED_NEXT
};

int64_t explored(int step, struct end *end, int64_t count, int64_t nap_ns, const uint64_t *given, int64_t num_given) {
    answers = given;
    num_answers = num_given;
    explored_answers = 0;
    if (setjmp(stopped))
        return STOPPED;
    switch (step) {
    case PUBLISH: kvplug_publish(end, count); return 0;
    case RELEASE: kvplug_release(end, count); return 0;
    case END_WRITING: kvplug_end_writing(end); return 0;
    case END_READING: kvplug_end_reading(end); return 0;
    case EVICT: kvplug_evict(end, count); return 0;
    case EVICT_WRITER: kvplug_evict_writer(end); return 0;
    case EVICTED: return kvplug_evicted(end);
    case ROOM: return kvplug_room(end);
    case AVAILABLE: return kvplug_available(end);
    case PUBLISH_BEHIND: publish_behind(end, gap_of(end), count); return 0;
    case ARRIVED_NEXT: return arrived_next(end);
    /* Without the look after a sleep, which is that of the next call. */
    case POLL_ROOM: return sleep_for_room(end, count, 0, nap_ns);
    default: return sleep_for_units(end, count, 0, nap_ns);
    }
}
