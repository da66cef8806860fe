#define _GNU_SOURCE
#include "caches.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NEVER_S -1e9

struct known {
    char *path;
    struct stat about;
    double kept_at_s;
    char *names;  // each is its d_type, its text and a 0
    size_t bytes;
    double listed_at_s;
};

static double attributes_s, listings_s;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *tree;

void caches_set(double of_attributes_s, double of_listings_s) {
    attributes_s = of_attributes_s;
    listings_s = of_listings_s;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int compare(const void *one, const void *other) {
    return strcmp(((const struct known *)one)->path, ((const struct known *)other)->path);
}

static struct known *find(const char *path) {
    struct known wanted = {.path = (char *)path};
    struct known **found = tfind(&wanted, &tree, compare);
    return found ? *found : NULL;
}

static struct known *find_or_make(const char *path) {
    struct known *known = find(path);
    if (known) return known;
    known = calloc(1, sizeof *known);
    *known = (struct known){.path = strdup(path), .kept_at_s = NEVER_S, .listed_at_s = NEVER_S};
    tsearch(known, &tree, compare);
    return known;
}

bool cache_find(const char *path, struct stat *about) {
    if (!attributes_s) return false;
    pthread_mutex_lock(&lock);
    struct known *known = find(path);
    bool young = known && now_s() - known->kept_at_s < attributes_s;
    if (young) *about = known->about;
    pthread_mutex_unlock(&lock);
    return young;
}

void cache_keep(const char *path, const struct stat *about) {
    if (!attributes_s) return;
    pthread_mutex_lock(&lock);
    struct known *known = find_or_make(path);
    known->about = *about;
    known->kept_at_s = now_s();
    pthread_mutex_unlock(&lock);
}

static int read_names(struct known *known, int handle) {
    if (handle < 0) return handle;
    DIR *folder = fdopendir(handle);
    if (!folder) return -errno;
    free(known->names);
    FILE *names = open_memstream(&known->names, &known->bytes);
    for (struct dirent *entry; (entry = readdir(folder));)
        fprintf(names, "%c%s%c", entry->d_type ? entry->d_type : DT_REG, entry->d_name, 0);
    fclose(names);
    closedir(folder);
    known->listed_at_s = now_s();
    return 0;
}

int cache_list(const char *path, int (*open_folder)(const char *path), each_name *each, void *to) {
    pthread_mutex_lock(&lock);
    struct known *known = find_or_make(path);
    bool young = now_s() - known->listed_at_s < listings_s;
    int error = young ? 0 : read_names(known, open_folder(path));
    if (!error)
        for (char *name = known->names, *end = name + known->bytes; name < end; name += strlen(name + 1) + 2)
            each(to, name + 1, (mode_t)DTTOIF((unsigned char)*name));
    pthread_mutex_unlock(&lock);
    return error;
}

void cache_forget(const char *path) {
    pthread_mutex_lock(&lock);
    struct known *known = find(path);
    if (known) known->kept_at_s = NEVER_S;
    pthread_mutex_unlock(&lock);
}

void cache_forget_name(const char *path) {
    size_t length = (size_t)(strrchr(path, '/') - path);
    char *folder = strndup(path, length ? length : 1);
    pthread_mutex_lock(&lock);
    struct known *both[] = {find(path), find(folder)};
    for (int i = 0; i < 2; i++)
        if (both[i]) both[i]->kept_at_s = both[i]->listed_at_s = NEVER_S;
    pthread_mutex_unlock(&lock);
    free(folder);
}
