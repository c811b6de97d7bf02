/* Two threads, the writer and the reader of one ring, for gcc's sanitizers.
 *
 * Usage: ring_driver SECONDS ROUNDS SEED. Built with -DRING_C="path of ring.c". It runs for at least that long, and at
 * least that many rounds. In every round a new ring, of a random size and with one of two ways to wait, carries flat
 * messages of random sizes; both threads draw the same numbers, so that the reader knows what has to come. Exit code 1
 * and a line at the first wrong byte; a round that takes 60 s: SIGALRM. */

#include RING_C

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define MESSAGES 64
#define LARGE_MESSAGES 4

struct round {
    uint64_t seed;
    uint64_t places;
    unsigned char *words, *bytes;
    int sleeps;      /* whether the ends sleep while they wait, or spin */
    int messages;
    int64_t largest; /* of a message */
};

struct draw {
    uint64_t state;
};

static uint64_t draw(struct draw *from) {
    from->state ^= from->state << 13;
    from->state ^= from->state >> 7;
    from->state ^= from->state << 17;
    return from->state;
}

struct shape {
    int64_t nbytes;
    int at_once; /* whether it is put at once, if it fits */
    unsigned char pattern;
};

static struct shape next_shape(struct draw *from, int64_t largest) {
    struct shape shape;
    uint64_t kind = draw(from) % 8;
    shape.nbytes = (int64_t)(draw(from) % (kind < 4 ? 300 : (uint64_t)largest)) + 1;
    shape.at_once = kind < 6;
    shape.pattern = (unsigned char)draw(from);
    return shape;
}

/* The bytes of a message: those of a table with a period of 256, from `pattern` on. */
static unsigned char table[512];

static const unsigned char *bytes_from(const struct shape *shape, int64_t at) {
    return table + (uint64_t)(at + shape->pattern) % 256;
}

static int64_t part_from(const struct shape *shape, int64_t at) {
    return shape->nbytes - at < 256 ? shape->nbytes - at : 256;
}

static unsigned char *memory_of(const struct shape *shape) {
    unsigned char *memory = malloc((size_t)shape->nbytes); /* exactly: a byte more is an error that a sanitizer sees */
    if (!memory)
        abort();
    return memory;
}

static void fill(unsigned char *memory, const struct shape *shape) {
    for (int64_t at = 0; at < shape->nbytes; at += 256)
        memcpy(memory + at, bytes_from(shape, at), (size_t)part_from(shape, at));
}

static void check(const unsigned char *memory, const struct shape *shape, int number) {
    for (int64_t at = 0; at < shape->nbytes; at += 256)
        if (memcmp(memory + at, bytes_from(shape, at), (size_t)part_from(shape, at))) {
            fprintf(stderr, "a wrong byte from %lld of %lld on in message %d\n", (long long)at,
                    (long long)shape->nbytes, number);
            exit(1);
        }
}

/* Until the reader has moved: a sleep, or a spin. */
static void wait_for_room(struct end *end, int sleeps) {
    kvplug_poll_room(end, kvplug_gap(end) + LINE, sleeps ? 0 : 100000, sleeps ? 1000000000 : 0);
}

static void *write_all(void *given) {
    const struct round *round = given;
    struct end end = {.words = round->words, .bytes = round->bytes, .places = round->places, .readers = 1,
                      .smallest = 2 * LINE, .largest = 1 << 16};
    struct draw windows = {round->seed};
    struct draw from = {round->seed};
    char prefix[LINE];
    for (int number = 0; number < round->messages; number++) {
        struct shape shape = next_shape(&from, round->largest);
        end.window = end.least_window = (draw(&windows) % (round->places / LINE - 1) + 2) * LINE;
        unsigned char *source = memory_of(&shape);
        struct span span = {.flat = source};
        fill(source, &shape);
        memset(prefix, shape.pattern, LINE);
        struct message message = {prefix, LINE, shape.nbytes, LINE + shape.nbytes};
        int64_t any = INT64_MAX / 4;
        end.at_once = number % 2 ? shape.nbytes : 0;
        int done = shape.at_once && kvplug_put(&end, &message, source, any) == 1;
        int64_t sent = done ? shape.nbytes : 0, before = LINE;
        while (sent < shape.nbytes) {
            uint64_t published = end.count;
            sent += kvplug_push(&end, prefix, before, &span, sent, shape.nbytes, round->sleeps ? 0 : 50000,
                                5000000);
            if (end.count != published)
                before = 0;
            if (sent < shape.nbytes)
                wait_for_room(&end, round->sleeps);
        }
        free(source);
    }
    return NULL;
}

static void wait_for_units(struct end *end, int64_t count, int sleeps) {
    if (sleeps)
        kvplug_poll_units(end, count, 1000, 1000000000);
    else
        spin_for_units(end, count, 100000);
}

static void *read_all(void *given) {
    const struct round *round = given;
    struct end end = {.words = round->words, .bytes = round->bytes, .places = round->places, .largest = 1 << 16};
    struct draw from = {round->seed};
    unsigned char line[LINE];
    for (int number = 0; number < round->messages; number++) {
        struct shape shape = next_shape(&from, round->largest);
        unsigned char *target = memory_of(&shape);
        struct span span = {.flat = target};
        int64_t here;
        while ((here = kvplug_peek(&end, line, round->sleeps ? 0 : 1000)) < LINE)
            wait_for_units(&end, LINE, round->sleeps);
        for (int each = 0; each < LINE; each++)
            if (line[each] != shape.pattern) {
                fprintf(stderr, "byte %d before message %d is wrong\n", each, number);
                exit(1);
            }
        if (here >= LINE + (int64_t)lines((uint64_t)shape.nbytes)) {
            kvplug_take(&end, target, shape.nbytes);
        } else {
            int64_t got = 0, unreleased = LINE;
            while (got < shape.nbytes) {
                int64_t enough = number % 3 && got < shape.nbytes / 2 ? got + 1 : shape.nbytes;
                int64_t more = kvplug_pull(&end, &span, got, shape.nbytes, enough, unreleased,
                                           round->sleeps ? 0 : 50000, 5000000);
                if (more)
                    unreleased = 0;
                got += more;
                if (got < shape.nbytes)
                    wait_for_units(&end, unreleased + LINE, round->sleeps);
            }
        }
        check(target, &shape, number);
        free(target);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    int64_t until = now_ns() + atoll(argv[1]) * 1000000000;
    struct draw from = {(uint64_t)atoll(argv[3]) * 2654435761u + 1};
    long rounds = 0, least = atol(argv[2]);
    for (int at = 0; at < 512; at++)
        table[at] = (unsigned char)(at * 7);
    do {
        alarm(60);
        struct round round = {.seed = draw(&from), .sleeps = rounds % 2 == 0};
        /* Now and then: messages large enough to be stored past the caches, and for a reader to change processors. */
        int large = rounds % 511 == 15;
        round.places = large ? 1 << 21 : (draw(&from) % 64 + 4) * LINE;
        round.largest = large ? STREAM_FROM_MOST + 1000 : (int64_t)round.places * 3;
        round.messages = large ? LARGE_MESSAGES : MESSAGES;
        round.words = aligned_alloc(LINE, (JUMP + 1) * LINE);
        round.bytes = aligned_alloc(LINE, round.places);
        if (!round.words || !round.bytes)
            abort();
        memset(round.words, 0, (JUMP + 1) * LINE);
        pthread_t writer, reader;
        if (pthread_create(&writer, NULL, write_all, &round) || pthread_create(&reader, NULL, read_all, &round))
            abort();
        pthread_join(writer, NULL);
        pthread_join(reader, NULL);
        free(round.words);
        free(round.bytes);
        rounds++;
    } while (now_ns() < until || rounds < least);
    printf("%ld rounds\n", rounds);
    return 0;
}
