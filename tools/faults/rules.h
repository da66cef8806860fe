// Rules of the fault file system: which call goes wrong, and how.
#ifndef FAULTFS_RULES_H
#define FAULTFS_RULES_H

#include <stdbool.h>
#include <stddef.h>

enum action { NOTE, KILL_BEFORE, KILL_AFTER, KILL_HALF, STOP_BEFORE, STOP_AFTER, ERROR_BEFORE, ERROR_AFTER, DELAY };

// One call on its way through the file system, and what was decided about it.
struct call {
    const char *op, *path, *target;
    int pid;
    bool hit;
    enum action action;
    int value;           // an errno, or milliseconds
    unsigned generation;  // of the rules that decided
};

// Replace all rules by those in `text`, one a line: op TAB path regex TAB process regex TAB when TAB action TAB value.
// Returns 0, or a negative errno where a line cannot be understood; the old rules stay then.
int rules_replace(const char *text);

// Write "calls seen TAB hits" of each rule into `buffer`; returns the length.
int rules_report(char *buffer, size_t size);

// Open the log of hits. Returns false where that fails.
bool rules_open_log(const char *path);

// Decide about a call, before it is carried out. Returns 0 to go on, else the negative errno that is its answer.
int call_begins(struct call *call, int pid, const char *op, const char *path, const char *target);

// Decide about the answer of a call that was carried out; returns the answer to give.
int call_ends(struct call *call, int result);

// Kill the caller: it never sees an answer.
void call_kill(const struct call *call);

#endif
