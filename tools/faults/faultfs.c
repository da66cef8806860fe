// A file system that passes everything on to a folder, save what its rules say, and caches like a client of a shared one.
//
//   faultfs MOUNT -f --backing=DIR --log=FILE [cache options]
//
// Rules are written into MOUNT/.faultfs, which no listing shows; reading it says how often each was seen and hit.
// Each mount of one folder is a host of its own: it has its own caches, and learns late what other mounts change.
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "caches.h"
#include "rules.h"

#define CONTROL "/.faultfs"
enum { FLOCK_POLL_US = 5000 };

static struct options {
    char *backing, *log;
    double attributes_s, entries_s, negative_s, listings_s;
    unsigned seed;
    int whole_seconds, silly_rename, no_close_to_open;
} options;

#define OPTION(text, field) {text, offsetof(struct options, field), 1}
static const struct fuse_opt SPEC[] = {
    OPTION("--backing=%s", backing),
    OPTION("--log=%s", log),
    OPTION("--seed=%u", seed),
    OPTION("--attributes-s=%lf", attributes_s),
    OPTION("--entries-s=%lf", entries_s),
    OPTION("--negative-s=%lf", negative_s),
    OPTION("--listings-s=%lf", listings_s),
    OPTION("--whole-seconds", whole_seconds),
    OPTION("--silly-rename", silly_rename),
    OPTION("--no-close-to-open", no_close_to_open),
    FUSE_OPT_END,
};

static int root;

// The name of `path` as seen from the folder behind.
static const char *at(const char *path) { return path[1] ? path + 1 : "."; }

static int answer(long result) { return result == -1 ? -errno : (int)result; }

// Carry out `expression` between the rules' two looks at it, and return what they say.
#define RULED(op, path, target, expression)                                             \
    struct call call;                                                                    \
    int refused = call_begins(&call, fuse_get_context()->pid, op, path ? path : "", target); \
    return refused ? refused : call_ends(&call, expression)

// This mount changed something about a name, or a file. Both return `result`.
static int changed_name(const char *path, int result) {
    cache_forget_name(path);
    return result;
}

static int changed_file(const char *path, int result) {
    if (path) cache_forget(path);
    return result;
}

// ---- the control file ----

static int is_control(const char *path) { return path && !strcmp(path, CONTROL); }

static int control_write(const char *data, size_t size) {
    char *text = strndup(data, size);
    int error = text ? rules_replace(text) : -ENOMEM;
    free(text);
    return error ? error : (int)size;
}

// ---- calls on names ----

static int attributes(const char *path, struct stat *about, struct fuse_file_info *file) {
    if (path && cache_find(path, about)) return 0;
    int error = answer(file ? fstat((int)file->fh, about) : fstatat(root, at(path), about, AT_SYMLINK_NOFOLLOW));
    if (error) return error;
    if (options.whole_seconds) about->st_mtim.tv_nsec = about->st_ctim.tv_nsec = about->st_atim.tv_nsec = 0;
    if (path) cache_keep(path, about);
    return 0;
}

static int fs_getattr(const char *path, struct stat *about, struct fuse_file_info *file) {
    if (is_control(path)) {
        *about = (struct stat){.st_mode = S_IFREG | 0600, .st_nlink = 1};
        return 0;
    }
    if (file) return attributes(path, about, file);
    RULED("stat", path, NULL, attributes(path, about, NULL));
}

static int fs_access(const char *path, int mode) { return is_control(path) ? 0 : answer(faccessat(root, at(path), mode, 0)); }

static int fs_readlink(const char *path, char *buffer, size_t size) {
    ssize_t length = readlinkat(root, at(path), buffer, size - 1);
    if (length < 0) return -errno;
    buffer[length] = 0;
    return 0;
}

static int open_folder(const char *path) {
    int handle = openat(root, at(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return handle < 0 ? -errno : handle;
}

struct listing {
    void *buffer;
    fuse_fill_dir_t fill;
};

static void list_name(void *to, const char *name, mode_t type) {
    struct stat about = {.st_mode = type, .st_ino = 1};  // names without a number are skipped
    ((struct listing *)to)->fill(((struct listing *)to)->buffer, name, &about, 0, 0);
}

static int fs_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *file,
                      enum fuse_readdir_flags flags) {
    (void)offset, (void)file, (void)flags;
    struct listing listing = {buffer, fill};
    // A folder that was removed while it is open has no path, and nothing in it.
    RULED("listdir", path, NULL, path ? cache_list(path, open_folder, list_name, &listing) : 0);
}

static int fs_mkdir(const char *path, mode_t mode) {
    RULED("mkdir", path, NULL, changed_name(path, answer(mkdirat(root, at(path), mode))));
}

static int fs_unlink(const char *path) { RULED("unlink", path, NULL, changed_name(path, answer(unlinkat(root, at(path), 0)))); }

static int fs_rmdir(const char *path) { RULED("rmdir", path, NULL, changed_name(path, answer(unlinkat(root, at(path), AT_REMOVEDIR)))); }

static int fs_symlink(const char *text, const char *path) {
    RULED("symlink", path, NULL, changed_name(path, answer(symlinkat(text, root, at(path)))));
}

static int fs_rename(const char *path, const char *target, unsigned flags) {
    RULED("rename", path, target, changed_name(path, changed_name(target, answer(renameat2(root, at(path), root, at(target), flags)))));
}

static int fs_link(const char *path, const char *target) {
    RULED("link", path, target, changed_name(target, changed_file(path, answer(linkat(root, at(path), root, at(target), 0)))));
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *file) {
    (void)file;
    RULED("chmod", path, NULL, changed_file(path, answer(fchmodat(root, at(path), mode, 0))));
}

static int fs_chown(const char *path, uid_t user, gid_t group, struct fuse_file_info *file) {
    (void)file;
    RULED("chown", path, NULL, changed_file(path, answer(fchownat(root, at(path), user, group, AT_SYMLINK_NOFOLLOW))));
}

static int cut(const char *path, off_t size) {
    int handle = openat(root, at(path), O_WRONLY | O_CLOEXEC);
    if (handle < 0) return -errno;
    int result = answer(ftruncate(handle, size));
    close(handle);
    return result;
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *file) {
    if (is_control(path)) return 0;
    RULED("truncate", path, NULL, changed_file(path, file ? answer(ftruncate((int)file->fh, size)) : cut(path, size)));
}

static int fs_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *file) {
    (void)file;
    RULED("utime", path, NULL, changed_file(path, answer(utimensat(root, at(path), times, AT_SYMLINK_NOFOLLOW))));
}

static int fs_statfs(const char *path, struct statvfs *about) {
    (void)path;
    return answer(fstatvfs(root, about));
}

// ---- calls on files ----

static int opened(const char *path, mode_t mode, struct fuse_file_info *file, int flags) {
    int handle = openat(root, at(path), (flags & ~O_DIRECT) | O_CLOEXEC, mode);
    if (handle < 0) return -errno;
    file->fh = (uint64_t)handle;
    file->keep_cache = (unsigned)options.no_close_to_open & 1;
    // A client that keeps close-to-open asks the server for a file's size when it is opened, however young its attributes are.
    if (!options.no_close_to_open || flags & O_TRUNC) cache_forget(path);
    return 0;
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *file) {
    RULED("create", path, NULL, changed_name(path, opened(path, mode, file, file->flags)));
}

static int fs_open(const char *path, struct fuse_file_info *file) {
    if (is_control(path)) {
        file->direct_io = 1;
        return 0;
    }
    RULED("open", path, NULL, opened(path, 0, file, file->flags & ~O_CREAT));
}

static int fs_read(const char *path, char *buffer, size_t size, off_t offset, struct fuse_file_info *file) {
    if (is_control(path)) return offset ? 0 : rules_report(buffer, size);
    RULED("read", path, NULL, answer(pread((int)file->fh, buffer, size, offset)));
}

static int half_write(struct call *call, int handle, const char *data, size_t size, off_t offset) {
    if (!call->hit || call->action != KILL_HALF) return answer(pwrite(handle, data, size, offset));
    long written = pwrite(handle, data, size / 2, offset);
    call_kill(call);
    return answer(written);
}

static int fs_write(const char *path, const char *data, size_t size, off_t offset, struct fuse_file_info *file) {
    if (is_control(path)) return control_write(data, size);
    RULED("write", path, NULL, changed_file(path, half_write(&call, (int)file->fh, data, size, offset)));
}

static int fs_flush(const char *path, struct fuse_file_info *file) {
    if (is_control(path)) return 0;
    RULED("close", path, NULL, answer(close(dup((int)file->fh))));
}

static int fs_release(const char *path, struct fuse_file_info *file) {
    return is_control(path) ? 0 : answer(close((int)file->fh));
}

// Nothing is lost with the power here, so nothing waits for a disk.
static int fs_fsync(const char *path, int data_only, struct fuse_file_info *file) {
    (void)data_only, (void)file;
    RULED("fsync", path, NULL, 0);
}

// Blocked callers can be killed: the kernel says so to who looks.
static int wait_for_lock(int handle, int operation) {
    while (flock(handle, operation | LOCK_NB)) {
        if (errno != EWOULDBLOCK || operation & LOCK_NB) return -errno;
        if (fuse_interrupted()) return -EINTR;
        usleep(FLOCK_POLL_US);
    }
    return 0;
}

static int fs_flock(const char *path, struct fuse_file_info *file, int operation) {
    RULED("flock", path, NULL, wait_for_lock((int)file->fh, operation));
}

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    connection->want &= ~(unsigned)(FUSE_CAP_READDIRPLUS | FUSE_CAP_READDIRPLUS_AUTO);
    config->use_ino = 1;
    config->attr_timeout = 0;  // the kernel forgets attributes at each read and listing: they are kept here
    caches_set(options.attributes_s, options.listings_s);
    config->entry_timeout = options.entries_s;
    config->negative_timeout = options.negative_s;
    config->hard_remove = !options.silly_rename;
    return NULL;
}

static const struct fuse_operations OPERATIONS = {
    .init = fs_init,         .getattr = fs_getattr,   .access = fs_access,   .readlink = fs_readlink, .readdir = fs_readdir,
    .mkdir = fs_mkdir,       .unlink = fs_unlink,     .rmdir = fs_rmdir,     .symlink = fs_symlink,   .rename = fs_rename,
    .link = fs_link,         .chmod = fs_chmod,       .chown = fs_chown,     .truncate = fs_truncate, .utimens = fs_utimens,
    .statfs = fs_statfs,     .create = fs_create,     .open = fs_open,       .read = fs_read,         .write = fs_write,
    .flush = fs_flush,       .release = fs_release,   .fsync = fs_fsync,     .fsyncdir = fs_fsync,    .flock = fs_flock,
};

int main(int count, char **words) {
    struct fuse_args arguments = FUSE_ARGS_INIT(count, words);
    if (fuse_opt_parse(&arguments, &options, SPEC, NULL) || !options.backing) return 2;
    if ((root = open(options.backing, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) return perror(options.backing), 2;
    if (options.log && !rules_open_log(options.log)) return perror(options.log), 2;
    char name[64];  // the mount is known by who serves it: one that nobody serves any more can be told
    snprintf(name, sizeof name, "-ofsname=faultfs:%d,subtype=faultfs", getpid());
    fuse_opt_add_arg(&arguments, name);
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // a mount does not outlive who made it
    srand48(options.seed);
    umask(0);
    return fuse_main(arguments.argc, arguments.argv, &OPERATIONS, NULL);
}
