/* A stand-in for NVIDIA's libnvidia-ml.so.1, for tests: GPUs as the environment describes them.
 *
 * Compiled against the real nvml.h, so that a wrong signature or structure does not compile.
 *
 * NVML_DOUBLE  settings "name=value", parted by ";", read anew by every call:
 *   gpus=2                  how many there are
 *   FUNCTION=3              that function answers with this code, for all GPUs
 *   1.FUNCTION=15           for GPU 1 alone
 *   1.*=15                  every function that takes GPU 1
 *   1.power=250000          a figure of GPU 1 in NVML's unit; `power=…` is of all
 *   1.name=text             the same for texts
 *   sleep=30                seconds that nvmlInitWithFlags takes, as in a wedged driver
 *
 * With OLD_DRIVER defined, functions that came in later drivers are not there.
 */
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_GPUS 16

static char marks[MOST_GPUS];

static nvmlDevice_t device_of(unsigned int index) { return (nvmlDevice_t)&marks[index]; }

static int index_of(nvmlDevice_t device) { return (int)((char *)device - marks); }

/* The text of a setting, up to the next ";"; NULL where there is none. */
static const char *find(const char *name) {
    const char *at = getenv("NVML_DOUBLE");
    size_t length = strlen(name);
    while (at != NULL && *at != '\0') {
        if (strncmp(at, name, length) == 0 && at[length] == '=') return at + length + 1;
        at = strchr(at, ';');
        if (at != NULL) at++;
    }
    return NULL;
}

static const char *setting(int gpu, const char *name) {
    char own[96];
    const char *found;
    snprintf(own, sizeof own, "%d.%s", gpu, name);
    found = find(own);
    return found != NULL ? found : find(name);
}

static unsigned long long number(int gpu, const char *name, unsigned long long otherwise) {
    const char *found = setting(gpu, name);
    return found != NULL ? strtoull(found, NULL, 0) : otherwise;
}

static void text(int gpu, const char *name, const char *otherwise, char *into, unsigned int length) {
    const char *found = setting(gpu, name);
    size_t size;
    if (found == NULL) found = otherwise;
    size = strcspn(found, ";");
    if (size >= length) size = length - 1;
    memcpy(into, found, size);
    into[size] = '\0';
}

static nvmlReturn_t answer(int gpu, const char *function) {
    char every[16];
    snprintf(every, sizeof every, "%d.*", gpu);
    if (gpu >= 0 && find(every) != NULL) return (nvmlReturn_t)strtoul(find(every), NULL, 0);
    return (nvmlReturn_t)number(gpu, function, NVML_SUCCESS);
}

#define REFUSE(gpu)                                                \
    do {                                                           \
        nvmlReturn_t code = answer(gpu, __func__);                 \
        if (code != NVML_SUCCESS) return code;                     \
    } while (0)

#define FIGURE(function, type, name, otherwise)                    \
    nvmlReturn_t function(nvmlDevice_t device, type *value) {      \
        REFUSE(index_of(device));                                  \
        *value = (type)number(index_of(device), name, otherwise);  \
        return NVML_SUCCESS;                                       \
    }

/* --- The system --- */

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    sleep((unsigned int)number(-1, "sleep", 0));
    REFUSE(-1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t result) {
    (void)result;
    return "an error of the test double";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    REFUSE(-1);
    text(-1, "driver", "550.54.15", version, length);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    REFUSE(-1);
    *version = (int)number(-1, "cuda", 12040);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    REFUSE(-1);
    *count = (unsigned int)number(-1, "gpus", 2);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    REFUSE((int)index);
    if (index >= number(-1, "gpus", 2) || index >= MOST_GPUS) return NVML_ERROR_INVALID_ARGUMENT;
    *device = device_of(index);
    return NVML_SUCCESS;
}

/* --- One GPU --- */

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    REFUSE(index_of(device));
    *index = (unsigned int)index_of(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    REFUSE(index_of(device));
    text(index_of(device), "name", "NVIDIA H100 80GB HBM3", name, length);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    char otherwise[32];
    REFUSE(index_of(device));
    snprintf(otherwise, sizeof otherwise, "GPU-%c0000000-0000", 'a' + index_of(device));
    text(index_of(device), "uuid", otherwise, uuid, length);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    REFUSE(index_of(device));
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x10u + (unsigned int)index_of(device);
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    REFUSE(index_of(device));
    rates->gpu = (unsigned int)number(index_of(device), "utilisation", 75);
    rates->memory = 40;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    REFUSE(index_of(device));
    /* The first version counts the driver's own share as used. */
    memory->total = number(index_of(device), "memory_total", 80ull << 30);
    memory->used = number(index_of(device), "memory", 8ull << 30) + (1ull << 30);
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

#ifndef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    REFUSE(index_of(device));
    if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = number(index_of(device), "memory_total", 80ull << 30);
    memory->used = number(index_of(device), "memory", 8ull << 30);
    memory->reserved = 1ull << 30;
    memory->free = memory->total - memory->used - memory->reserved;
    return NVML_SUCCESS;
}

FIGURE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 0)
FIGURE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, "energy", 5000000)
#endif

FIGURE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle", 0)
FIGURE(nvmlDeviceGetPowerUsage, unsigned int, "power", 300000)
FIGURE(nvmlDeviceGetEnforcedPowerLimit, unsigned int, "limit", 700000)
FIGURE(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, "persistence", 1)
FIGURE(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, "width", 16)
FIGURE(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, "width_most", 16)

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius) {
    REFUSE(index_of(device));
    if (sensor != NVML_TEMPERATURE_GPU) return NVML_ERROR_INVALID_ARGUMENT;
    *celsius = (unsigned int)number(index_of(device), "temperature", 55);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock) {
    REFUSE(index_of(device));
    if (type != NVML_CLOCK_SM) return NVML_ERROR_INVALID_ARGUMENT;
    *clock = (unsigned int)number(index_of(device), "clock", 1980);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock) {
    REFUSE(index_of(device));
    if (type != NVML_CLOCK_SM) return NVML_ERROR_INVALID_ARGUMENT;
    *clock = 1980;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
    REFUSE(index_of(device));
    *current = *pending = (nvmlEnableState_t)number(index_of(device), "ecc", 1);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long *count) {
    REFUSE(index_of(device));
    if (counter != NVML_VOLATILE_ECC) return NVML_ERROR_INVALID_ARGUMENT;
    *count = number(index_of(device), type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? "corrected" : "uncorrected", 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failed) {
    REFUSE(index_of(device));
    *corrected = *uncorrected = 0;
    *pending = (unsigned int)number(index_of(device), "remapping_pending", 0);
    *failed = (unsigned int)number(index_of(device), "remapping_failed", 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    REFUSE(index_of(device));
    *current = *pending = (unsigned int)number(index_of(device), "mig", 0);
    return NVML_SUCCESS;
}

/* `processes` are numbered from 4000; each holds 1 GiB. */
static nvmlReturn_t processes(int gpu, unsigned int *count, nvmlProcessInfo_t *infos) {
    unsigned int found = (unsigned int)number(gpu, "processes", 0), room = infos == NULL ? 0 : *count, i;
    *count = found;
    if (found > room) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (i = 0; i < found; i++) {
        memset(&infos[i], 0, sizeof infos[i]);
        infos[i].pid = 4000 + i;
        infos[i].usedGpuMemory = 1ull << 30;
    }
    return NVML_SUCCESS;
}

#ifdef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_v2_t *infos) {
    REFUSE(index_of(device));
    return processes(index_of(device), count, infos);
}
#else
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos) {
    REFUSE(index_of(device));
    return processes(index_of(device), count, infos);
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    REFUSE(index_of(device));
    if (setting(index_of(device), "fabric") == NULL) return NVML_ERROR_NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    info->state = (nvmlGpuFabricState_t)number(index_of(device), "fabric", 0);
    info->status = (nvmlReturn_t)number(index_of(device), "fabric_status", 0);
    return NVML_SUCCESS;
}
#endif

/* --- Links --- */

/* `nvlinks` is how many a GPU has; bits of `nvlinks_down` are those that are not up. */
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state) {
    unsigned long long links = number(index_of(device), "nvlinks", 18);
    REFUSE(index_of(device));
    if (links == 0) return NVML_ERROR_NOT_SUPPORTED;
    if (link >= links) return NVML_ERROR_INVALID_ARGUMENT;
    *state = number(index_of(device), "nvlinks_down", 0) >> link & 1 ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuTopologyLevel_t *level) {
    REFUSE(index_of(one));
    REFUSE(index_of(other));
    *level = (nvmlGpuTopologyLevel_t)number(index_of(other), "path", NVML_TOPOLOGY_SYSTEM);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuP2PCapsIndex_t what,
                                    nvmlGpuP2PStatus_t *status) {
    REFUSE(index_of(one));
    REFUSE(index_of(other));
    *status = (nvmlGpuP2PStatus_t)number(index_of(other), what == NVML_P2P_CAPS_INDEX_NVLINK ? "p2p_nvlink" : "p2p_read",
                                         NVML_P2P_STATUS_OK);
    return NVML_SUCCESS;
}

/* --- Events --- */

static int events_mark;
static unsigned int watched;

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    REFUSE(-1);
    watched = 0;
    *set = (nvmlEventSet_t)&events_mark;
    return NVML_SUCCESS;
}

FIGURE(nvmlDeviceGetSupportedEventTypes, unsigned long long, "events", nvmlEventTypeXidCriticalError)

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    (void)set;
    REFUSE(index_of(device));
    if (types & nvmlEventTypeXidCriticalError) watched |= 1u << index_of(device);
    return NVML_SUCCESS;
}

/* `xid` of a watched GPU is told once for every change of `xid_number`. */
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds) {
    static unsigned long long told[MOST_GPUS];
    int gpu;
    (void)set;
    (void)milliseconds;
    for (gpu = 0; gpu < MOST_GPUS; gpu++) {
        unsigned long long occurrence = number(gpu, "xid_number", 0);
        if (watched >> gpu & 1 && occurrence != told[gpu]) {
            told[gpu] = occurrence;
            memset(data, 0, sizeof *data);
            data->device = device_of((unsigned int)gpu);
            data->eventType = nvmlEventTypeXidCriticalError;
            data->eventData = number(gpu, "xid", 79);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_TIMEOUT;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    (void)set;
    return NVML_SUCCESS;
}
