#define _GNU_SOURCE
#include "faults.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC "kvplug fake IPC"
enum { PAGE = 4096, USERS = 256, FREED = 0xDD };

/* Before the bytes, in a page of its own: which processes have it open. */
struct head {
    uint64_t serial;
    _Atomic int users[USERS];
};

struct handle {
    char magic[sizeof MAGIC];
    int pid, fd;
    uint64_t serial, nbytes;
};

_Static_assert(sizeof(struct head) <= PAGE && sizeof(struct handle) <= 64, "sizes");

typedef struct {
    char reserved[64];
} cudaIpcMemHandle_t;

struct memory {
    struct memory *next;
    char *bytes;
    uint64_t serial;
    size_t nbytes;
    int fd, count; /* -1: another process's, and how many times it was opened */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct memory *all;
static uint64_t last_serial;

static struct head *head_of(const struct memory *memory) { return (struct head *)(memory->bytes - PAGE); }

static struct memory *add(char *mapped, uint64_t serial, size_t nbytes, int fd) {
    struct memory *memory = malloc(sizeof *memory);
    *memory = (struct memory){all, mapped + PAGE, serial, nbytes, fd, 1};
    return all = memory;
}

static void drop(struct memory *memory) {
    struct memory **place = &all;
    while (*place != memory)
        place = &(*place)->next;
    *place = memory->next;
    munmap(memory->bytes - PAGE, PAGE + memory->nbytes);
    if (memory->fd >= 0)
        close(memory->fd);
    free(memory);
}

/* Allocated here, or opened from another process. */
static struct memory *find(const void *address, bool allocated) {
    struct memory *memory = all;
    while (memory && (memory->bytes != address || (memory->fd >= 0) != allocated))
        memory = memory->next;
    return memory;
}

static void swap_user(struct head *head, int from, int to) {
    for (int k = 0; k < USERS; k++) {
        int expected = from;
        if (atomic_compare_exchange_strong(&head->users[k], &expected, to))
            return;
    }
}

static bool lives(int pid) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return false;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
        state = 'Z';
    fclose(file);
    return state != 'Z' && state != 'X';
}

EXPORT cudaError_t cudaMalloc(void **address, size_t nbytes) {
    if (disturbs_capture())
        return cudaErrorStreamCaptureUnsupported;
    if (setting(MALLOC_RESULT))
        return (cudaError_t)setting(MALLOC_RESULT);
    int fd = memfd_create("kvplug-fake-gpu", MFD_CLOEXEC);
    if (fd < 0)
        return cudaErrorMemoryAllocation;
    char *mapped = MAP_FAILED;
    if (!ftruncate(fd, (off_t)(PAGE + nbytes)))
        mapped = mmap(NULL, PAGE + nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
        close(fd);
        return cudaErrorMemoryAllocation;
    }
    pthread_mutex_lock(&lock);
    struct memory *memory = add(mapped, ++last_serial, nbytes, fd);
    head_of(memory)->serial = memory->serial;
    *address = memory->bytes;
    pthread_mutex_unlock(&lock);
    tally(ALLOCATIONS, 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *address) {
    if (!address)
        return cudaSuccess;
    if (disturbs_capture())
        return cudaErrorStreamCaptureUnsupported;
    streams_drain();
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address, true);
    if (memory) {
        for (int k = 0; k < USERS; k++) {
            int user = atomic_load(&head_of(memory)->users[k]);
            if (user && lives(user))
                tally(FREED_WHILE_MAPPED, 1);
        }
        memset(memory->bytes, FREED, memory->nbytes < PAGE ? memory->nbytes : PAGE);
        drop(memory);
        tally(ALLOCATIONS, -1);
    }
    pthread_mutex_unlock(&lock);
    return memory ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *address) {
    struct handle handle = {.magic = MAGIC, .pid = getpid()};
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address, true);
    if (memory) {
        handle.fd = memory->fd;
        handle.serial = memory->serial;
        handle.nbytes = memory->nbytes;
        memset(out, 0, sizeof *out);
        memcpy(out, &handle, sizeof handle);
    }
    pthread_mutex_unlock(&lock);
    return memory ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t given, unsigned int flags) {
    struct handle handle;
    char path[64];
    memcpy(&handle, &given, sizeof handle);
    if (setting(OPEN_RESULT))
        return (cudaError_t)setting(OPEN_RESULT);
    if (flags != 1 || memcmp(handle.magic, MAGIC, sizeof MAGIC))
        return cudaErrorInvalidValue;
    if (handle.pid == getpid())
        return cudaErrorDeviceUninitialized;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return cudaErrorMapBufferObjectFailed;
    char *mapped = mmap(NULL, PAGE + handle.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED)
        return cudaErrorMapBufferObjectFailed;
    if (((struct head *)mapped)->serial != handle.serial) {
        munmap(mapped, PAGE + handle.nbytes);
        return cudaErrorInvalidResourceHandle;
    }
    pthread_mutex_lock(&lock);
    struct memory *memory = add(mapped, handle.serial, handle.nbytes, -1);
    swap_user(head_of(memory), 0, getpid());
    *address = memory->bytes;
    pthread_mutex_unlock(&lock);
    tally(MAPPINGS, 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaIpcCloseMemHandle(void *address) {
    pthread_mutex_lock(&lock);
    struct memory *memory = find(address, false);
    if (memory) {
        swap_user(head_of(memory), getpid(), 0);
        drop(memory);
        tally(MAPPINGS, -1);
    }
    pthread_mutex_unlock(&lock);
    return memory ? cudaSuccess : cudaErrorInvalidValue;
}

/* The memory is the parent's: as with a real GPU, it is not mapped here, and no descriptor stays open. */
static void forget_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    for (struct memory *memory = all; memory; memory = memory->next) {
        munmap(memory->bytes - PAGE, PAGE + memory->nbytes);
        if (memory->fd >= 0)
            close(memory->fd);
        tally(memory->fd >= 0 ? ALLOCATIONS : MAPPINGS, -1);
    }
    all = NULL;
}

__attribute__((constructor)) static void look_out_for_forks(void) { pthread_atfork(NULL, NULL, forget_in_child); }
