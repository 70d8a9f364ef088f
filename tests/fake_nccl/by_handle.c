/* Takes NCCL by an explicit handle, as ctypes and JAX do, and prints what it sees. Not linked with NCCL.
 *   calls FILE [FILE...]   opens each, makes five calls on each; `global` before a FILE opens it with RTLD_GLOBAL
 *   lifecycle FILE         RTLD_NOLOAD, repeated dlopen, dlclose
 *   thread FILE            the calls from a thread
 *   fork FILE              the calls in a child, then here
 *   through LIBRARY FILE   LIBRARY opens FILE by its own dlopen; then the calls
 *   late FILE OTHER        opens both, OTHER with RTLD_GLOBAL; then the calls on FILE
 *   open FILE              prints the loader's error, if there is one
 * With BY_HANDLE_EARLY=FILE the calls are also made before main. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct {
  char bytes[128];
} Id;

static const char* clean(void) { return dlerror() == NULL ? "" : ", an error left behind"; }

/* Five calls through the handle; how many its library says arrived, by a function that only the fake has. */
static int callAll(void* handle) {
  int (*const unique)(Id*) = (int (*)(Id*))dlsym(handle, "ncclGetUniqueId");
  int (*const init)(void**, int, Id, int) = (int (*)(void**, int, Id, int))dlsym(handle, "ncclCommInitRank");
  int (*const reduce)(const void*, void*, size_t, int, int, void*, void*) =
      (int (*)(const void*, void*, size_t, int, int, void*, void*))dlsym(handle, "ncclAllReduce");
  int (*const bcast)(void*, size_t, int, int, void*, void*) =
      (int (*)(void*, size_t, int, int, void*, void*))dlsym(handle, "ncclBcast");
  int (*const gather)(const void*, void*, size_t, int, void*, void*) =
      (int (*)(const void*, void*, size_t, int, void*, void*))dlsym(handle, "ncclAllGather");
  int (*const count)(void*, int*) = (int (*)(void*, int*))dlsym(handle, "ncclCommCount");
  int (*const destroy)(void*) = (int (*)(void*))dlsym(handle, "ncclCommDestroy");
  uint64_t (*const calls)(const char*) = (uint64_t (*)(const char*))dlsym(handle, "fake_nccl_calls");
  uint64_t (*const foreign)(void) = (uint64_t (*)(void))dlsym(handle, "fake_nccl_foreign_comms");
  if (!unique || !init || !reduce || !bcast || !gather || !count || !destroy || !calls || !foreign) return -1;
  float a[8] = {0};
  Id id;
  void* comm = NULL;
  int ranks = 0;
  const uint64_t before = calls("ncclAllReduce") + calls("ncclBcast") + calls("ncclAllGather");
  if (unique(&id) != 0) return -2;
  if (init(&comm, 1, id, 0) != 0) return -3;
  if (count(comm, &ranks) != 0 || ranks != 1) return -4;
  for (int i = 0; i < 3; ++i) {
    if (reduce(a, a, 8, 7, 0, comm, NULL) != 0) return -5;
  }
  if (bcast(a, 8, 7, 0, comm, NULL) != 0) return -6;
  if (gather(a, a, 8, 7, comm, NULL) != 0) return -7;
  if (destroy(comm) != 0) return -8;
  if (foreign() != 0) return -9;
  return (int)(calls("ncclAllReduce") + calls("ncclBcast") + calls("ncclAllGather") - before);
}

static int openAndCall(const char* file, int mode) {
  void* handle = dlopen(file, RTLD_NOW | mode);
  if (handle == NULL) {
    printf("%s\n", dlerror());
    return 1;
  }
  const char* state = clean();
  printf("%d calls%s\n", callAll(handle), state);
  return 0;
}

__attribute__((constructor)) static void early(void) {
  const char* file = getenv("BY_HANDLE_EARLY");
  if (file != NULL) openAndCall(file, 0);
}

static void* inThread(void* file) {
  openAndCall(file, 0);
  return NULL;
}

static int lifecycle(const char* file) {
  printf("before: %d\n", dlopen(file, RTLD_LAZY | RTLD_NOLOAD) != NULL);
  (void)dlerror();
  void* first = dlopen(file, RTLD_LAZY);
  printf("opened: %d%s\n", first != NULL, clean());
  void* second = dlopen(file, RTLD_NOW);
  void* third = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
  printf("again: %d %d%s\n", second == first, third == first, clean());
  for (int i = 0; i < 3; ++i) printf("close: %d\n", dlclose(first));
  printf("after: %d\n", dlopen(file, RTLD_LAZY | RTLD_NOLOAD) != NULL);
  (void)dlerror();
  first = dlopen(file, RTLD_LAZY);
  printf("local: %d\n", dlsym(RTLD_DEFAULT, "fake_nccl_calls") != NULL);
  (void)dlerror();
  second = dlopen(file, RTLD_LAZY | RTLD_GLOBAL);
  printf("global: %d %d\n", second == first, dlsym(RTLD_DEFAULT, "fake_nccl_calls") != NULL);
  return openAndCall(file, 0);
}

int main(int argc, char** argv) {
  setvbuf(stdout, NULL, _IONBF, 0);
  if (argc < 3) return 2;
  const char* what = argv[1];
  if (strcmp(what, "calls") == 0) {
    int failed = 0, mode = 0;
    for (int i = 2; i < argc; ++i) {
      if (strcmp(argv[i], "global") == 0) {
        mode = RTLD_GLOBAL;
        continue;
      }
      failed |= openAndCall(argv[i], mode);
      mode = 0;
    }
    return failed;
  }
  if (strcmp(what, "lifecycle") == 0) return lifecycle(argv[2]);
  if (strcmp(what, "thread") == 0) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, inThread, argv[2]) != 0) return 1;
    return pthread_join(thread, NULL);
  }
  if (strcmp(what, "fork") == 0) {
    const pid_t child = fork();
    if (child == 0) exit(openAndCall(argv[2], 0));
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) return 1;
    return openAndCall(argv[2], 0);
  }
  if (strcmp(what, "open") == 0) {
    void* handle = dlopen(argv[2], RTLD_NOW);
    printf("%s\n", handle != NULL ? "opened" : dlerror());
    printf("then%s\n", clean());
    return 0;
  }
  if (strcmp(what, "late") == 0 && argc == 4) {
    void* handle = dlopen(argv[2], RTLD_NOW);
    if (handle == NULL || dlopen(argv[3], RTLD_NOW | RTLD_GLOBAL) == NULL) return 1;
    printf("%d calls\n", callAll(handle));
    return 0;
  }
  if (strcmp(what, "through") == 0 && argc == 4) {
    void* library = dlopen(argv[2], RTLD_NOW);
    void* (*const openFile)(const char*) =
        library != NULL ? (void* (*)(const char*))dlsym(library, "openFile") : NULL;
    if (openFile == NULL) return 1;
    void* handle = openFile(argv[3]);
    if (handle == NULL) {
      printf("%s\n", dlerror());
      return 0;
    }
    int (*const answer)(void) = (int (*)(void))dlsym(handle, "answer");
    if (answer != NULL) {
      printf("answer %d\n", answer());
    } else {
      printf("%d calls\n", callAll(handle));
    }
    return 0;
  }
  return 2;
}
