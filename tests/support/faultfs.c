/* faultfs SOURCE MOUNTPOINT: shows the folder SOURCE at MOUNTPOINT, and fails as it is told. In the foreground, until
 * it is unmounted, until whoever started it has ended (then it unmounts), or until it is killed (then everything on it
 * fails with ENOTCONN). Nothing is cached: every read and write comes here, O_DIRECT or not, of any alignment. Each
 * request has a thread, so that a hanging one holds up no other here.
 *
 * Rules are lines written to MOUNTPOINT/.faultfs:
 *   clear                                   no rules; what hangs goes on
 *   OP ACTION [ARGUMENT] [OPTION=VALUE]...  one more rule
 * OP: read, write, fsync, flush, create, fallocate, and rename: those with flags, which some file systems refuse.
 * ACTION: error NUMBER   fails with this errno
 *         short BYTES    read or write does at most so much of it
 *         delay MS       goes on after so long
 *         hang           goes on after "clear"
 *         flip SEED      one bit of the data that is read, or that is written, is the other one; which one follows
 *                        from SEED and how many have been
 * OPTION: after=N (not the first N that it fits), times=N (only N times), name=SUFFIX (of the file's name),
 *         from=BYTE, to=BYTE (only what touches bytes [from, to) of the file).
 * The first rule that fits acts. A line that is no rule fails with EINVAL and changes nothing. Reading the file gives,
 * for each OP, a line "OP REQUESTS ACTED HANGING".
 *
 * Threads: libfuse's. `lock` guards rules and counters, and is never held over a request to SOURCE or while one waits.
 */
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define CONTROL "/.faultfs"
#define MAX_RULES 32
#define MAX_LINE 256

enum op { OP_READ, OP_WRITE, OP_FSYNC, OP_FLUSH, OP_CREATE, OP_FALLOCATE, OP_RENAME, OPS };
static const char* const op_names[OPS] = {"read", "write", "fsync", "flush", "create", "fallocate", "rename"};
enum action { ACT_NONE, ACT_ERROR, ACT_SHORT, ACT_DELAY, ACT_HANG, ACT_FLIP };
static const char* const action_names[] = {"", "error", "short", "delay", "hang", "flip"};

struct rule {
  enum op op;
  enum action action;
  uint64_t argument;
  uint64_t after, times;
  uint64_t from, to;
  char name[64];
};

static int source; /* descriptor of SOURCE */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cleared = PTHREAD_COND_INITIALIZER;
static struct rule rules[MAX_RULES];
static int rule_count;
static uint64_t clears; /* times that "clear" came */
static struct { uint64_t requests, acted, hanging; } counts[OPS];

/* An open file. */
struct file {
  int fd;
  bool control;
  char path[];
};

static const char* below(const char* path) { return path[1] == 0 ? "." : path + 1; }
static bool is_control(const char* path) { return path != NULL && strcmp(path, CONTROL) == 0; }
static struct file* file_of(const struct fuse_file_info* info) { return (struct file*)(uintptr_t)info->fh; }
static int result(int rc) { return rc < 0 ? -errno : rc; }

/* ---- Rules ---- */

static bool ends_with(const char* text, const char* end) {
  const size_t a = strlen(text), b = strlen(end);
  return a >= b && strcmp(text + a - b, end) == 0;
}

/* What is to be done with a request; hangs and delays are over when it returns. */
static struct rule consult(enum op op, const char* path, uint64_t offset, uint64_t bytes) {
  struct rule found = {.action = ACT_NONE};
  pthread_mutex_lock(&lock);
  ++counts[op].requests;
  for (int i = 0; i < rule_count; ++i) {
    struct rule* rule = &rules[i];
    if (rule->op != op || !ends_with(path, rule->name)) continue;
    if (offset >= rule->to || offset + bytes <= rule->from) continue;
    if (rule->after > 0) {
      --rule->after;
      continue;
    }
    if (rule->times == 0) continue;
    if (rule->times != UINT64_MAX) --rule->times;
    found = *rule;
    break;
  }
  if (found.action != ACT_NONE) {
    found.argument += found.action == ACT_FLIP ? counts[op].acted : 0; /* another bit each time */
    ++counts[op].acted;
  }
  if (found.action == ACT_HANG) {
    ++counts[op].hanging;
    for (const uint64_t seen = clears; clears == seen;) pthread_cond_wait(&cleared, &lock);
    --counts[op].hanging;
  }
  pthread_mutex_unlock(&lock);
  if (found.action == ACT_DELAY) {
    struct timespec left = {(time_t)(found.argument / 1000), (long)(found.argument % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
  }
  return found;
}

static int find_name(const char* word, const char* const* names, int count) {
  for (int i = 0; i < count; ++i) {
    if (word != NULL && strcmp(word, names[i]) == 0) return i;
  }
  return -1;
}

static bool take_number(const char* text, uint64_t* number) {
  char* end;
  if (text == NULL || *text < '0' || *text > '9') return false;
  errno = 0;
  *number = strtoull(text, &end, 10);
  return errno == 0 && *end == 0;
}

static bool take_option(char* word, struct rule* rule) {
  char* value = strchr(word, '=');
  if (value == NULL) return false;
  *value++ = 0;
  if (strcmp(word, "name") == 0) {
    if (strlen(value) >= sizeof rule->name) return false;
    strcpy(rule->name, value);
    return true;
  }
  uint64_t* number = strcmp(word, "after") == 0   ? &rule->after
                     : strcmp(word, "times") == 0 ? &rule->times
                     : strcmp(word, "from") == 0  ? &rule->from
                     : strcmp(word, "to") == 0    ? &rule->to
                                                  : NULL;
  return number != NULL && take_number(value, number);
}

/* 0 or a negated errno. */
static int take_line(char* line) {
  char* rest = NULL;
  char* word = strtok_r(line, " ", &rest);
  if (word == NULL) return 0;
  if (strcmp(word, "clear") == 0) {
    if (strtok_r(NULL, " ", &rest) != NULL) return -EINVAL;
    pthread_mutex_lock(&lock);
    rule_count = 0;
    ++clears;
    pthread_cond_broadcast(&cleared);
    pthread_mutex_unlock(&lock);
    return 0;
  }
  struct rule rule = {.times = UINT64_MAX, .to = UINT64_MAX};
  const int op = find_name(word, op_names, OPS);
  const int action = find_name(strtok_r(NULL, " ", &rest), action_names, ACT_FLIP + 1);
  if (op < 0 || action <= 0) return -EINVAL;
  rule.op = (enum op)op;
  rule.action = (enum action)action;
  const bool of_data = rule.action == ACT_SHORT || rule.action == ACT_FLIP;
  if (of_data && rule.op != OP_READ && rule.op != OP_WRITE) return -EINVAL;
  if (rule.action != ACT_HANG && !take_number(strtok_r(NULL, " ", &rest), &rule.argument)) return -EINVAL;
  if (rule.action == ACT_ERROR && (rule.argument == 0 || rule.argument > 4095)) return -EINVAL;
  while ((word = strtok_r(NULL, " ", &rest)) != NULL) {
    if (!take_option(word, &rule)) return -EINVAL;
  }
  pthread_mutex_lock(&lock);
  const bool room = rule_count < MAX_RULES;
  if (room) rules[rule_count++] = rule;
  pthread_mutex_unlock(&lock);
  return room ? 0 : -ENOSPC;
}

static int take_lines(const char* text, size_t bytes) {
  while (bytes > 0) {
    char line[MAX_LINE];
    const char* end = memchr(text, '\n', bytes);
    const size_t length = end == NULL ? bytes : (size_t)(end - text);
    if (length >= sizeof line) return -EINVAL;
    memcpy(line, text, length);
    line[length] = 0;
    const int wrong = take_line(line);
    if (wrong != 0) return wrong;
    const size_t taken = length + (end != NULL);
    text += taken;
    bytes -= taken;
  }
  return 0;
}

static int read_counts(char* buffer, size_t size, off_t offset) {
  char text[512];
  size_t length = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < OPS; ++i) {
    length += (size_t)snprintf(text + length, sizeof text - length, "%s %llu %llu %llu\n", op_names[i],
                               (unsigned long long)counts[i].requests, (unsigned long long)counts[i].acted,
                               (unsigned long long)counts[i].hanging);
  }
  pthread_mutex_unlock(&lock);
  if ((size_t)offset >= length) return 0;
  const size_t count = length - (size_t)offset < size ? length - (size_t)offset : size;
  memcpy(buffer, text + offset, count);
  return (int)count;
}

static void flip(char* data, size_t bytes, uint64_t seed) {
  const uint64_t bit = (seed * 0x9e3779b97f4a7c15u >> 11) % (bytes * 8);
  data[bit / 8] = (char)(data[bit / 8] ^ (1 << bit % 8));
}

/* ---- Files ---- */

static int fs_open_as(const char* path, struct fuse_file_info* info, int flags, mode_t mode) {
  const size_t length = strlen(path) + 1;
  struct file* file = malloc(sizeof *file + length);
  if (file == NULL) return -ENOMEM;
  memcpy(file->path, path, length);
  file->control = is_control(path);
  file->fd = -1;
  if (!file->control) {
    /* O_DIRECT is between the kernel and us; SOURCE is read and written through its page cache. */
    file->fd = openat(source, below(path), (flags & ~O_DIRECT & ~O_NOFOLLOW) | O_CLOEXEC, mode);
    if (file->fd < 0) {
      const int error = errno;
      free(file);
      return -error;
    }
  }
  info->fh = (uintptr_t)file;
  info->direct_io = 1;
  return 0;
}

static int fs_open(const char* path, struct fuse_file_info* info) { return fs_open_as(path, info, info->flags, 0); }

static int fs_create(const char* path, mode_t mode, struct fuse_file_info* info) {
  const struct rule rule = consult(OP_CREATE, path, 0, 1);
  if (rule.action == ACT_ERROR) return -(int)rule.argument;
  return fs_open_as(path, info, info->flags | O_CREAT, mode);
}

static int fs_read(const char* path, char* buffer, size_t size, off_t offset, struct fuse_file_info* info) {
  (void)path;
  const struct file* file = file_of(info);
  if (file->control) return read_counts(buffer, size, offset);
  const struct rule rule = consult(OP_READ, file->path, (uint64_t)offset, size);
  if (rule.action == ACT_ERROR) return -(int)rule.argument;
  if (rule.action == ACT_SHORT && rule.argument < size) size = rule.argument;
  const ssize_t got = pread(file->fd, buffer, size, offset);
  if (got > 0 && rule.action == ACT_FLIP) flip(buffer, (size_t)got, rule.argument);
  return got < 0 ? -errno : (int)got;
}

static int fs_write(const char* path, const char* data, size_t size, off_t offset, struct fuse_file_info* info) {
  (void)path;
  const struct file* file = file_of(info);
  if (file->control) {
    const int wrong = take_lines(data, size);
    return wrong != 0 ? wrong : (int)size;
  }
  const struct rule rule = consult(OP_WRITE, file->path, (uint64_t)offset, size);
  if (rule.action == ACT_ERROR) return -(int)rule.argument;
  if (rule.action == ACT_SHORT && rule.argument < size) size = rule.argument;
  char* flipped = NULL;
  if (rule.action == ACT_FLIP && size > 0) {
    flipped = malloc(size);
    if (flipped == NULL) return -ENOMEM;
    memcpy(flipped, data, size);
    flip(flipped, size, rule.argument);
  }
  const ssize_t put = pwrite(file->fd, flipped != NULL ? flipped : data, size, offset);
  const int error = errno;
  free(flipped);
  return put < 0 ? -error : (int)put;
}

static int fs_flush(const char* path, struct fuse_file_info* info) {
  (void)path;
  const struct file* file = file_of(info);
  if (file->control) return 0;
  const struct rule rule = consult(OP_FLUSH, file->path, 0, 1);
  return rule.action == ACT_ERROR ? -(int)rule.argument : 0;
}

static int fs_release(const char* path, struct fuse_file_info* info) {
  (void)path;
  struct file* file = file_of(info);
  const int rc = file->fd >= 0 ? result(close(file->fd)) : 0;
  free(file);
  return rc;
}

static int fs_fsync(const char* path, int data_only, struct fuse_file_info* info) {
  (void)path;
  const struct file* file = file_of(info);
  if (file->control) return 0;
  const struct rule rule = consult(OP_FSYNC, file->path, 0, 1);
  if (rule.action == ACT_ERROR) return -(int)rule.argument;
  return result(data_only ? fdatasync(file->fd) : fsync(file->fd));
}

static int fs_fallocate(const char* path, int mode, off_t offset, off_t bytes, struct fuse_file_info* info) {
  (void)path;
  const struct file* file = file_of(info);
  if (file->control) return -EOPNOTSUPP;
  const struct rule rule = consult(OP_FALLOCATE, file->path, (uint64_t)offset, (uint64_t)bytes);
  if (rule.action == ACT_ERROR) return -(int)rule.argument;
  return result(fallocate(file->fd, mode, offset, bytes));
}

static int fs_getattr(const char* path, struct stat* st, struct fuse_file_info* info) {
  if (info != NULL && info->fh != 0 && !file_of(info)->control) return result(fstat(file_of(info)->fd, st));
  if (info == NULL || info->fh == 0) {
    if (!is_control(path)) return result(fstatat(source, below(path), st, AT_SYMLINK_NOFOLLOW));
  }
  memset(st, 0, sizeof *st);
  st->st_mode = S_IFREG | 0600;
  st->st_nlink = 1;
  st->st_uid = geteuid();
  st->st_gid = getegid();
  return 0;
}

static int fs_truncate(const char* path, off_t size, struct fuse_file_info* info) {
  if (info != NULL) return file_of(info)->control ? 0 : result(ftruncate(file_of(info)->fd, size));
  if (is_control(path)) return 0;
  const int fd = openat(source, below(path), O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return -errno;
  const int rc = result(ftruncate(fd, size));
  close(fd);
  return rc;
}

static int fs_chmod(const char* path, mode_t mode, struct fuse_file_info* info) {
  if (info != NULL) return file_of(info)->control ? -EPERM : result(fchmod(file_of(info)->fd, mode));
  return result(fchmodat(source, below(path), mode, 0));
}

static int fs_chown(const char* path, uid_t uid, gid_t gid, struct fuse_file_info* info) {
  if (info != NULL) return file_of(info)->control ? -EPERM : result(fchown(file_of(info)->fd, uid, gid));
  return result(fchownat(source, below(path), uid, gid, AT_SYMLINK_NOFOLLOW));
}

static int fs_utimens(const char* path, const struct timespec times[2], struct fuse_file_info* info) {
  if (info != NULL) return file_of(info)->control ? 0 : result(futimens(file_of(info)->fd, times));
  return result(utimensat(source, below(path), times, AT_SYMLINK_NOFOLLOW));
}

/* ---- Names ---- */

static int fs_readlink(const char* path, char* buffer, size_t size) {
  const ssize_t got = readlinkat(source, below(path), buffer, size - 1);
  if (got < 0) return -errno;
  buffer[got] = 0;
  return 0;
}
static int fs_mkdir(const char* path, mode_t mode) { return result(mkdirat(source, below(path), mode)); }
static int fs_unlink(const char* path) { return result(unlinkat(source, below(path), 0)); }
static int fs_rmdir(const char* path) { return result(unlinkat(source, below(path), AT_REMOVEDIR)); }
static int fs_symlink(const char* target, const char* path) { return result(symlinkat(target, source, below(path))); }
static int fs_link(const char* from, const char* to) {
  return result(linkat(source, below(from), source, below(to), 0));
}
static int fs_rename(const char* from, const char* to, unsigned int flags) {
  if (flags != 0) {
    const struct rule rule = consult(OP_RENAME, from, 0, 1);
    if (rule.action == ACT_ERROR) return -(int)rule.argument;
  }
  return result(renameat2(source, below(from), source, below(to), flags));
}

static int fs_opendir(const char* path, struct fuse_file_info* info) {
  return fs_open_as(path, info, O_RDONLY | O_DIRECTORY, 0);
}

/* All of it each time, so that `offset` stays 0. */
static int fs_readdir(const char* path, void* buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info* info,
                      enum fuse_readdir_flags flags) {
  (void)path;
  (void)offset;
  (void)flags;
  const int fd = openat(file_of(info)->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* with a place of its own */
  if (fd < 0) return -errno;
  DIR* folder = fdopendir(fd);
  if (folder == NULL) {
    const int error = errno;
    close(fd);
    return -error;
  }
  const struct dirent* entry;
  errno = 0;
  while ((entry = readdir(folder)) != NULL) {
    if (fill(buffer, entry->d_name, NULL, 0, 0) != 0) break;
    errno = 0;
  }
  const int error = entry == NULL ? errno : ENOMEM;
  closedir(folder);
  return -error;
}

static int fs_fsyncdir(const char* path, int data_only, struct fuse_file_info* info) {
  (void)path;
  (void)data_only;
  return result(fsync(file_of(info)->fd));
}

static int fs_statfs(const char* path, struct statvfs* st) {
  (void)path;
  return result(fstatvfs(source, st));
}

static void* fs_init(struct fuse_conn_info* connection, struct fuse_config* config) {
  config->hard_remove = 1; /* open files that are removed stay what they are, by their descriptor */
  config->nullpath_ok = 1;
  config->use_ino = 1; /* that of SOURCE: it stays the same as long as the file is there */
  config->attr_timeout = config->entry_timeout = config->negative_timeout = 0;
  /* Hanging ones must not use up what may be under way at once. */
  connection->max_background = 512;
  connection->congestion_threshold = 512;
  return NULL;
}

static const struct fuse_operations operations = {
    .getattr = fs_getattr,
    .readlink = fs_readlink,
    .mkdir = fs_mkdir,
    .unlink = fs_unlink,
    .rmdir = fs_rmdir,
    .symlink = fs_symlink,
    .rename = fs_rename,
    .link = fs_link,
    .chmod = fs_chmod,
    .chown = fs_chown,
    .truncate = fs_truncate,
    .open = fs_open,
    .read = fs_read,
    .write = fs_write,
    .statfs = fs_statfs,
    .flush = fs_flush,
    .release = fs_release,
    .fsync = fs_fsync,
    .opendir = fs_opendir,
    .readdir = fs_readdir,
    .releasedir = fs_release,
    .fsyncdir = fs_fsyncdir,
    .init = fs_init,
    .create = fs_create,
    .utimens = fs_utimens,
    .fallocate = fs_fallocate,
};

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "Usage: faultfs SOURCE MOUNTPOINT\n");
    return 64;
  }
  source = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (source < 0) {
    perror(argv[1]);
    return 66;
  }
  if (prctl(PR_SET_PDEATHSIG, SIGTERM) != 0) {
    perror("prctl");
    return 71;
  }
  umask(0); /* the kernel has applied the caller's */
  char options[] = "fsname=faultfs,max_threads=256,max_idle_threads=16";
  char* arguments[] = {argv[0], argv[2], "-f", "-o", options, NULL};
  return fuse_main(5, arguments, &operations, NULL);
}
