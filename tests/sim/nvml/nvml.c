/* SPDX-License-Identifier: GPL-3.0-or-later
 *
 * A stand-in for libnvidia-ml.so.1: the calls that the collection makes through pynvml, answered from the ledger of
 * the simulator (its lines are described in ../ledger.py; the environment variable SIM_LEDGER names the file).
 * The file is read anew for every call, so that a test sees a change at once.
 *
 * Faults, from the ledger's `fault` lines: not_loaded, mismatch, no_permission (each at nvmlInit), gpu_lost UUID,
 * unknown_device UUID, memory_error, memory_zero, hide_processes, unknown_process_memory, reverse_order, slow MS.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { /* nvmlReturn_t */
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18, UNKNOWN = 999
};
enum { MAX_GPUS = 16, MAX_PROCESSES = 256, MAX_FAULTS = 16, TEXT = 96 };
#define MIB (1024ULL * 1024ULL)
#define OVERHEAD_MIB 43ULL
#define NOT_AVAILABLE (~0ULL)

typedef unsigned long long u64;
typedef struct { char uuid[TEXT], name[TEXT]; u64 total, reserved, held; } gpu_t;
typedef struct { char uuid[TEXT]; unsigned pid; u64 mib; } process_t;
typedef struct { char name[TEXT], arg[TEXT]; } fault_t;
typedef struct { u64 total, free, used; } memory_v1_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_info_t;

/* read anew by every call; NVML may be asked by several threads at a time */
static _Thread_local gpu_t gpus[MAX_GPUS];
static _Thread_local process_t processes[MAX_PROCESSES];
static _Thread_local fault_t faults[MAX_FAULTS];
static _Thread_local char driver[TEXT];
static _Thread_local unsigned n_gpus, n_processes, n_faults;
static int initialized;
static char handles[MAX_GPUS]; /* a device handle is the address of its index's byte */

/* 1 when this very process lives; start 0 asks no question; a zombie does not live */
static int lives(unsigned pid, u64 start)
{
    char path[64], text[1024], *rest, state;
    u64 found = 0;
    FILE *file;
    size_t length;

    if (start == 0)
        return 1;
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    if (!(file = fopen(path, "r")))
        return 0;
    length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    if (!(rest = strrchr(text, ')')))
        return 0;
    if (sscanf(rest + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
               &state, &found) != 2)
        return 0;
    return state != 'Z' && state != 'X' && found == start;
}

static void charge(const char *uuid, unsigned pid, u64 mib)
{
    for (unsigned i = 0; i < n_processes; i++)
        if (processes[i].pid == pid && !strcmp(processes[i].uuid, uuid)) {
            processes[i].mib += mib;
            return;
        }
    if (n_processes < MAX_PROCESSES) {
        process_t *process = &processes[n_processes++];
        snprintf(process->uuid, TEXT, "%s", uuid);
        process->pid = pid;
        process->mib = mib;
    }
}

static void read_line(const char *line)
{
    char uuid[TEXT], word[TEXT], name[TEXT] = "";
    unsigned pid, owner;
    u64 start, owner_start, mib, reserved;
    double until;

    if (sscanf(line, "driver %95s", driver) == 1)
        return;
    if (sscanf(line, "gpu %95s %llu %llu %95[^\n]", uuid, &mib, &reserved, name) == 4 && n_gpus < MAX_GPUS) {
        gpu_t *gpu = &gpus[n_gpus++];
        strcpy(gpu->uuid, uuid);
        strcpy(gpu->name, name);
        gpu->total = mib;
        gpu->reserved = reserved;
        gpu->held = 0;
    } else if (sscanf(line, "alloc %95s %u %llu %llu", uuid, &pid, &start, &mib) == 4) {
        if (lives(pid, start))
            charge(uuid, pid, mib);
    } else if (sscanf(line, "map %95s %u %llu %llu %u %llu", uuid, &pid, &start, &mib, &owner, &owner_start) == 6) {
        if (lives(pid, start) && !lives(owner, owner_start))
            charge(uuid, pid, mib);
    } else if (sscanf(line, "hold %95s %lf %llu", uuid, &until, &mib) == 3) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        for (unsigned i = 0; i < n_gpus; i++)
            if (!strcmp(gpus[i].uuid, uuid) && (until == 0 || until >= now.tv_sec + now.tv_nsec / 1e9))
                gpus[i].held += mib;
    } else if (n_faults < MAX_FAULTS && sscanf(line, "fault %95s %95s", word, name) == 2) {
        strcpy(faults[n_faults].name, word);
        strcpy(faults[n_faults++].arg, name);
    }
}

static const char *fault(const char *name)
{
    for (unsigned i = 0; i < n_faults; i++)
        if (!strcmp(faults[i].name, name))
            return faults[i].arg;
    return NULL;
}

static int load(void)
{
    const char *path = getenv("SIM_LEDGER"), *delay;
    char line[1024];
    FILE *file;

    n_gpus = n_processes = n_faults = 0;
    strcpy(driver, "0");
    if (!path || !(file = fopen(path, "r")))
        return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, file))
        read_line(line);
    fclose(file);
    if ((delay = fault("slow")))
        usleep((unsigned)atoi(delay) * 1000);
    if (fault("reverse_order"))
        for (unsigned i = 0; i < n_gpus / 2; i++) {
            gpu_t other = gpus[i];
            gpus[i] = gpus[n_gpus - 1 - i];
            gpus[n_gpus - 1 - i] = other;
        }
    return OK;
}

/* every call but nvmlInit begins here */
static int ready(void)
{
    return initialized ? load() : UNINITIALIZED;
}

static int device(void *handle, gpu_t **gpu)
{
    size_t index = (size_t)((char *)handle - handles);
    const char *lost;
    int rc = ready();

    if (rc != OK)
        return rc;
    if (index >= n_gpus)
        return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    lost = fault("gpu_lost");
    return lost && (!strcmp(lost, "1") || !strcmp(lost, (*gpu)->uuid)) ? GPU_IS_LOST : OK;
}

static int copy(const char *from, char *to, unsigned size)
{
    if (strlen(from) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

int nvmlInit_v2(void)
{
    int rc = load();

    if (rc == OK && fault("not_loaded"))
        rc = DRIVER_NOT_LOADED;
    if (rc == OK && fault("mismatch"))
        rc = LIB_RM_VERSION_MISMATCH;
    if (rc == OK && fault("no_permission"))
        rc = NO_PERMISSION;
    initialized += rc == OK;
    return rc;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return nvmlInit_v2();
}

int nvmlShutdown(void)
{
    if (!initialized)
        return UNINITIALIZED;
    initialized--;
    return OK;
}

const char *nvmlErrorString(int code)
{
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "RM has detected an NVML/RM version mismatch.";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    int rc = ready();
    return rc == OK ? copy(driver, version, length) : rc;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    int rc = ready();
    *count = n_gpus;
    return rc;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    gpu_t *gpu;
    *handle = handles + index;
    return index < MAX_GPUS ? device(*handle, &gpu) : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    gpu_t *gpu;
    const char *unknown;
    int rc = ready();

    if (rc != OK)
        return rc;
    if ((unknown = fault("unknown_device")) && (!strcmp(unknown, "1") || !strcmp(unknown, uuid)))
        return NOT_FOUND;
    for (unsigned i = 0; i < n_gpus; i++)
        if (!strcmp(gpus[i].uuid, uuid)) {
            *handle = handles + i;
            return device(*handle, &gpu);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index)
{
    gpu_t *gpu;
    int rc = device(handle, &gpu);
    *index = (unsigned)((char *)handle - handles);
    return rc;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length)
{
    gpu_t *gpu;
    int rc = device(handle, &gpu);
    return rc == OK ? copy(gpu->uuid, uuid, length) : rc;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length)
{
    gpu_t *gpu;
    int rc = device(handle, &gpu);
    return rc == OK ? copy(gpu->name, name, length) : rc;
}

static int used_mib(void *handle, gpu_t **gpu, u64 *used)
{
    int rc = device(handle, gpu), any = 0;

    if (rc != OK)
        return rc;
    if (fault("memory_error"))
        return UNKNOWN;
    *used = (*gpu)->held;
    for (unsigned i = 0; i < n_processes; i++)
        if (!strcmp(processes[i].uuid, (*gpu)->uuid)) {
            *used += processes[i].mib;
            any = 1;
        }
    if (any)
        *used += OVERHEAD_MIB;
    if (*used > (*gpu)->total - (*gpu)->reserved)
        *used = (*gpu)->total - (*gpu)->reserved;
    if (fault("memory_zero"))
        *used = 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_v1_t *memory)
{
    gpu_t *gpu;
    u64 used;
    int rc = used_mib(handle, &gpu, &used);

    if (rc != OK)
        return rc;
    memory->total = gpu->total * MIB;
    memory->used = (used + gpu->reserved) * MIB; /* version 1 counts what is reserved as used */
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory)
{
    gpu_t *gpu;
    u64 used;
    int rc = used_mib(handle, &gpu, &used);

    if (rc != OK)
        return rc;
    memory->total = gpu->total * MIB;
    memory->reserved = gpu->reserved * MIB;
    memory->used = used * MIB;
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_info_t *infos)
{
    gpu_t *gpu;
    unsigned found = 0, room = *count;
    int rc = device(handle, &gpu);

    if (rc != OK)
        return rc;
    if (fault("hide_processes")) {
        *count = 0;
        return OK;
    }
    for (unsigned i = 0; i < n_processes; i++) {
        if (strcmp(processes[i].uuid, gpu->uuid))
            continue;
        if (found < room && infos)
            infos[found] = (process_info_t){processes[i].pid,
                                            fault("unknown_process_memory") ? NOT_AVAILABLE : processes[i].mib * MIB,
                                            0xFFFFFFFFu, 0xFFFFFFFFu};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, process_info_t *infos)
{
    gpu_t *gpu;
    (void)infos;
    *count = 0;
    return device(handle, &gpu);
}
