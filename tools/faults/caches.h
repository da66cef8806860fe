// What a mount believes about names without asking the folder behind, for a time: it forgets what it changes itself.
#ifndef FAULTFS_CACHES_H
#define FAULTFS_CACHES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

void caches_set(double attributes_s, double listings_s);

// Fill in the attributes of `path` as they were when they were kept. Returns false where they are too old, or were never kept.
bool cache_find(const char *path, struct stat *about);
void cache_keep(const char *path, const struct stat *about);

// Call `each` for the names of a folder, opened by `open_folder(path)` where they are too old. Returns 0 or a negative errno.
typedef void each_name(void *to, const char *name, mode_t type);
int cache_list(const char *path, int (*open_folder)(const char *path), each_name *each, void *to);

// Forget the attributes of a file.
void cache_forget(const char *path);

// Forget all about a name and the folder that it lies in.
void cache_forget_name(const char *path);

#endif
