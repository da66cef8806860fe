#define _GNU_SOURCE
#include "rules.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <regex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FIELDS = 6, OP_BYTES = 16, WHO_BYTES = 512, SUBJECT_BYTES = 8400, POLL_US = 5000 };

static const char *const ACTIONS[] = {"note",       "kill-before",  "kill-after",  "kill-half", "stop-before",
                                      "stop-after", "error-before", "error-after", "delay"};

struct rule {
    char op[OP_BYTES];
    regex_t path, who;
    bool any_who;
    long nth;            // 0: by probability
    double probability;
    enum action action;
    int value;
    long seen, hits;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule *rules;
static size_t count;
static unsigned generation;
static FILE *hits;

static void rules_free(struct rule *list, size_t n) {
    for (size_t i = 0; i < n; i++) {
        regfree(&list[i].path);
        regfree(&list[i].who);
    }
    free(list);
}

static int rule_parse(struct rule *rule, char *line) {
    char *fields[FIELDS];
    for (int i = 0; i < FIELDS; i++)
        if (!(fields[i] = strsep(&line, "\t"))) return -EINVAL;
    memset(rule, 0, sizeof *rule);
    snprintf(rule->op, sizeof rule->op, "%s", fields[0]);
    if (strchr(fields[3], '.'))
        rule->probability = atof(fields[3]);
    else if ((rule->nth = atol(fields[3])) < 1)
        return -EINVAL;
    rule->value = atoi(fields[5]);
    rule->any_who = !*fields[2];
    size_t action = 0, known = sizeof ACTIONS / sizeof *ACTIONS;
    while (action < known && strcmp(ACTIONS[action], fields[4])) action++;
    if (action == known) return -EINVAL;
    rule->action = (enum action)action;
    if (regcomp(&rule->path, fields[1], REG_EXTENDED | REG_NOSUB)) return -EINVAL;
    if (regcomp(&rule->who, fields[2], REG_EXTENDED | REG_NOSUB)) {
        regfree(&rule->path);
        return -EINVAL;
    }
    return 0;
}

int rules_replace(const char *text) {
    size_t lines = 1, made = 0;
    for (const char *c = text; *c; c++) lines += *c == '\n';
    struct rule *fresh = calloc(lines, sizeof *fresh);
    char *copy = strdup(text), *rest = copy, *line;
    int error = fresh && copy ? 0 : -ENOMEM;
    while (!error && (line = strsep(&rest, "\n")))
        if (*line && !(error = rule_parse(&fresh[made], line))) made++;
    free(copy);
    if (error) {
        rules_free(fresh, made);
        return error;
    }
    pthread_mutex_lock(&lock);
    rules_free(rules, count);
    rules = fresh;
    count = made;
    generation++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int rules_report(char *buffer, size_t size) {
    size_t used = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(buffer + used, size - used, "%ld\t%ld\n", rules[i].seen, rules[i].hits);
    pthread_mutex_unlock(&lock);
    return (int)(used < size ? used : size);
}

bool rules_open_log(const char *path) { return (hits = fopen(path, "ae")) != NULL; }

static void who_is(int pid, char *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    int handle = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = handle < 0 ? 0 : read(handle, name, WHO_BYTES - 1);
    if (handle >= 0) close(handle);
    name[n > 0 ? n : 0] = 0;
    for (ssize_t i = 0; i < n; i++)
        if (!name[i] || name[i] == '\t' || name[i] == '\n') name[i] = ' ';
}

// time, op, path, target, action, value, answer ("-": not yet), pid, command line
static void log_hit(const struct call *call, const char *answer) {
    char who[WHO_BYTES];
    if (!hits) return;
    who_is(call->pid, who);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    fprintf(hits, "%ld.%06ld\t%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", (long)now.tv_sec, now.tv_nsec / 1000, call->op, call->path,
            call->target ? call->target : "", ACTIONS[call->action], call->value, answer, call->pid, who);
    fflush(hits);
}

static bool rule_hits(struct rule *rule, const struct call *call, const char *subject, char *who) {
    if (strcmp(rule->op, "*") && strcmp(rule->op, call->op)) return false;
    if (regexec(&rule->path, subject, 0, NULL, 0)) return false;
    if (!rule->any_who) {
        if (!*who) who_is(call->pid, who);
        if (regexec(&rule->who, who, 0, NULL, 0)) return false;
    }
    rule->seen++;
    return rule->nth ? rule->seen == rule->nth : drand48() < rule->probability;
}

static unsigned generation_now(void) {
    pthread_mutex_lock(&lock);
    unsigned now = generation;
    pthread_mutex_unlock(&lock);
    return now;
}

// Whether the caller was sent a SIGKILL, which it cannot follow while it waits for an answer.
static bool is_killed(int pid) {
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *status = fopen(path, "re");
    if (!status) return true;
    unsigned long long mask, pending = 0;
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "SigPnd: %llx", &mask) == 1 || sscanf(line, "ShdPnd: %llx", &mask) == 1) pending |= mask;
    fclose(status);
    return pending & 1ULL << (SIGKILL - 1);
}

// Stop the caller in the middle of its call: that is carried out once the rules are others, and never if the caller is killed.
static int hold(const struct call *call) {
    if (call->pid) kill(call->pid, SIGSTOP);
    while (call->generation == generation_now()) {
        if (is_killed(call->pid)) return -EINTR;
        usleep(POLL_US);
    }
    return is_killed(call->pid) ? -EINTR : 0;
}

void call_kill(const struct call *call) {
    if (call->pid) kill(call->pid, SIGKILL);
}

int call_begins(struct call *call, int pid, const char *op, const char *path, const char *target) {
    *call = (struct call){.op = op, .path = path, .target = target, .pid = pid};
    char subject[SUBJECT_BYTES], who[WHO_BYTES] = "";
    pthread_mutex_lock(&lock);
    if (count) snprintf(subject, sizeof subject, "%s%s%s", path, target ? ">" : "", target ? target : "");
    for (size_t i = 0; i < count && !call->hit; i++) {
        if (!rule_hits(&rules[i], call, subject, who)) continue;
        rules[i].hits++;
        call->hit = true;
        call->action = rules[i].action;
        call->value = rules[i].value;
        call->generation = generation;
    }
    if (call->hit && call->action != NOTE) log_hit(call, "-");
    pthread_mutex_unlock(&lock);
    if (!call->hit) return 0;
    switch (call->action) {
        case KILL_BEFORE: call_kill(call); return -EINTR;
        case STOP_BEFORE: return hold(call);
        case ERROR_BEFORE: return -call->value;
        case DELAY: usleep((useconds_t)call->value * 1000); return 0;
        default: return 0;
    }
}

int call_ends(struct call *call, int result) {
    if (!call->hit) return result;
    char answer[16];
    switch (call->action) {
        case NOTE:
            snprintf(answer, sizeof answer, "%d", result);
            pthread_mutex_lock(&lock);
            log_hit(call, answer);
            pthread_mutex_unlock(&lock);
            return result;
        case KILL_AFTER: call_kill(call); return result;
        case STOP_AFTER:
            if (call->pid) kill(call->pid, SIGSTOP);
            return result;
        case ERROR_AFTER: return result < 0 ? result : -call->value;
        default: return result;
    }
}
