/* Copies between rows of pages and the blocks of a paged cache, with the checksum of each part.
 *
 * A row holds the bytes of one page: layer after layer, part after part, token after token. In the cache, a token
 * of a part lies at
 *
 *     base[layer, part] + id[token / block_tokens] * block_stride + (token % block_tokens) * token_stride
 *
 * and its bytes may have further axes, whose strides are given for the cache and for the row. copy.py is the Python
 * side, and says who checks the arguments. This file checks nothing.
 */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_AXES 4

typedef uint64_t (*hash_function)(const void *data, size_t nbytes);

/* The same hash, for data that comes in pieces. */
struct hash_stream {
    void *(*create)(void); /* returns a state, or NULL */
    int (*release)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t nbytes);
    uint64_t (*digest)(const void *state);
};

/* Larger parts are copied and hashed in pieces of this size, so that each piece is read from memory once. */
#define PIECE (128 * 1024)

/* Where one part of one layer lies. All fields but `num_axes` and `counts` are in bytes. */
struct part {
    int64_t base; /* the address of block 0 */
    int64_t block_stride;
    int64_t token_stride;
    int64_t token_bytes; /* of a token in a row */
    int64_t run;         /* bytes that are contiguous both in the cache and in a row */
    int64_t num_axes;    /* of a token, outside its runs; the one with the largest stride in the cache first */
    int64_t counts[MAX_AXES];
    int64_t in_cache[MAX_AXES];
    int64_t in_row[MAX_AXES];
};

/* All rows of one request. Threads may share it: each call works on some rows and some layers. */
struct task {
    const int64_t *rows; /* the address of each row's first layer */
    int64_t num_layers;
    int64_t num_parts;
    int64_t layer_nbytes;
    const struct part *parts; /* layer after layer */
    const int64_t *ids;   /* block ids */
    int64_t ids_step;     /* from the ids of one part of a layer to those of the next; 0: all parts share them */
    int64_t block_tokens;
    int64_t page_tokens;
    int64_t first_token;  /* of the first row, counted from the first block's first token */
    const int64_t *begins; /* for each layer: tokens before this one are left as they are */
    int64_t end;           /* tokens from this one on are left as they are */
    hash_function hash;  /* NULL: no checksums */
    const struct hash_stream *stream;
    uint64_t *checksums; /* row after row, layer after layer, part after part; big-endian */
    const int64_t *words;        /* addresses of the rows' generations; NULL: rows are not reused */
    const uint64_t *generations; /* the values that the words must have after the copy */
};

/* HASH leaves the cache alone. CHECK reads the cache, where each part of a page must be contiguous, and leaves the rows
 * alone. */
enum what { SAVE, LOAD, HASH, CHECK };
enum fault { IS_WRONG = 1, IS_GONE = 2 };

/* The CRC-32 of this file when it was compiled. hatch_build.py sets it. */
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0
#endif
uint32_t kvplug_pages_source(void) { return SOURCE_CRC32; }

/* Copies one run. Runs of usual head sizes are copied without a call. */
static inline void move(char *restrict to, const char *restrict from, int64_t nbytes) {
    switch (nbytes) {
    case 64: memcpy(to, from, 64); break;
    case 128: memcpy(to, from, 128); break;
    case 256: memcpy(to, from, 256); break;
    case 512: memcpy(to, from, 512); break;
    default: memcpy(to, from, (size_t)nbytes);
    }
}

static inline void move_run(char *cache, char *row, int64_t nbytes, int into_cache) {
    if (into_cache)
        move(cache, row, nbytes);
    else
        move(row, cache, nbytes);
}

/* Copies `count` tokens of one block, over the axes from `axis` on. */
static void move_axes(const struct part *part, char *cache, char *row, int64_t count, int64_t axis,
                      int into_cache) {
    if (axis < part->num_axes) {
        for (int64_t at = 0; at < part->counts[axis]; at++)
            move_axes(part, cache + at * part->in_cache[axis], row + at * part->in_row[axis], count, axis + 1,
                      into_cache);
        return;
    }
    /* The innermost loop is over tokens: where a cache's head axis is outside its token axis, tokens are adjacent. */
    for (int64_t token = 0; token < count; token++)
        move_run(cache + token * part->token_stride, row + token * part->token_bytes, part->run, into_cache);
}

static void move_tokens(const struct task *task, const struct part *part, int64_t at_part, char *row,
                        int64_t first, int64_t begin, int64_t end, int into_cache) {
    const int64_t *ids = task->ids + at_part * task->ids_step;
    int is_dense = !part->num_axes && part->token_stride == part->token_bytes;
    for (int64_t token = begin; token < end;) {
        int64_t in_block = token % task->block_tokens;
        int64_t count = task->block_tokens - in_block;
        if (count > end - token) count = end - token;
        char *cache = (char *)(intptr_t)part->base + ids[token / task->block_tokens] * part->block_stride +
                      in_block * part->token_stride;
        char *from = row + (token - first) * part->token_bytes;
        if (is_dense)
            move_run(cache, from, count * part->token_bytes, into_cache);
        else
            move_axes(part, cache, from, count, 0, into_cache);
        token += count;
    }
}

/* Returns the address of a token in the cache. */
static char *in_cache(const struct task *task, const struct part *part, int64_t at_part, int64_t token) {
    const int64_t *ids = task->ids + at_part * task->ids_step;
    return (char *)(intptr_t)part->base + ids[token / task->block_tokens] * part->block_stride +
           token % task->block_tokens * part->token_stride;
}

static inline uint64_t big_endian(uint64_t number) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return __builtin_bswap64(number);
#else
    return number;
#endif
}

/* Copies and hashes, piece by piece, a large part that is contiguous in the cache, too. Returns 0, and does nothing,
 * if there is no memory for the hash's state. */
static int move_in_pieces(const struct task *task, int what, char *cache, char *row, int64_t nbytes, uint64_t *hash) {
    const struct hash_stream *stream = task->stream;
    void *state = stream->create();
    if (state == NULL) return 0;
    stream->reset(state);
    for (int64_t at = 0; at < nbytes; at += PIECE) {
        size_t count = (size_t)(nbytes - at < PIECE ? nbytes - at : PIECE);
        if (what == SAVE) memcpy(row + at, cache + at, count);
        stream->update(state, what == CHECK ? cache + at : row + at, count);
        if (what == LOAD) memcpy(cache + at, row + at, count);
    }
    *hash = stream->digest(state);
    stream->release(state);
    return 1;
}

/* Processes one row. Returns whether a checksum differs from the given one; SAVE and HASH store checksums instead. */
static int move_row(const struct task *task, int what, int64_t number, int64_t first_layer, int64_t num_layers) {
    int64_t first = task->first_token + number * task->page_tokens;
    int64_t end = first + task->page_tokens < task->end ? first + task->page_tokens : task->end;
    char *bytes = (char *)(intptr_t)(task->rows[number] + first_layer * task->layer_nbytes);
    int64_t at_part = first_layer * task->num_parts;
    int is_wrong = 0;
    for (int64_t layer = first_layer; layer < first_layer + num_layers; layer++) {
        int64_t begin = task->begins[layer] > first ? task->begins[layer] : first;
        for (int64_t at = 0; at < task->num_parts; at++, at_part++) {
            const struct part *part = &task->parts[at_part];
            int64_t nbytes = task->page_tokens * part->token_bytes;
            uint64_t found = 0;
            int is_whole = begin == first && end == first + task->page_tokens && !part->num_axes &&
                           part->token_stride == part->token_bytes &&
                           first % task->block_tokens + task->page_tokens <= task->block_tokens;
            int in_pieces = task->hash != NULL && nbytes > PIECE && is_whole &&
                            move_in_pieces(task, what, in_cache(task, part, at_part, first), bytes, nbytes, &found);
            if (!in_pieces && what == SAVE) move_tokens(task, part, at_part, bytes, first, begin, end, 0);
            if (!in_pieces && task->hash != NULL)
                found = task->hash(what == CHECK ? in_cache(task, part, at_part, first) : bytes, (size_t)nbytes);
            if (!in_pieces && what == LOAD) move_tokens(task, part, at_part, bytes, first, begin, end, 1);
            if (task->hash != NULL) {
                uint64_t *checksum = &task->checksums[number * task->num_layers * task->num_parts + at_part];
                if (what == SAVE || what == HASH)
                    *checksum = big_endian(found);
                else
                    is_wrong |= big_endian(found) != *checksum;
            }
            bytes += nbytes;
        }
    }
    return is_wrong;
}

/* Processes some layers of some rows. Sets a byte of `faults` for each of these rows. Returns 0 if all are 0. */
int kvplug_pages_move(const struct task *task, int what, int64_t first_row, int64_t num_rows, int64_t first_layer,
                      int64_t num_layers, unsigned char *faults) {
    int any = 0;
    for (int64_t at = 0; at < num_rows; at++)
        faults[at] = move_row(task, what, first_row + at, first_layer, num_layers) ? IS_WRONG : 0;
    /* The generations are read after the rows. */
    atomic_thread_fence(memory_order_acquire);
    for (int64_t at = 0; at < num_rows; at++) {
        if (task->words != NULL) {
            const volatile uint64_t *word = (const volatile uint64_t *)(intptr_t)task->words[first_row + at];
            if (*word != task->generations[first_row + at]) faults[at] |= IS_GONE;
        }
        any |= faults[at];
    }
    return any;
}
