// Runs a command in a child process with a time limit: if it hangs or aborts, this process continues.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace md {

struct ChildOptions {
  double seconds = 60;                             // then it is killed, with its descendants
  std::map<std::string, std::string> environment;  // in addition to this process's
  std::vector<std::string> without;                // prefixes of variables that are removed
  std::string log;                                 // file that also receives its output; empty: none
  /// Called several times a second; kills the child when it returns true. May be empty.
  std::function<bool()> enough;
};
struct ChildResult {
  int status = -1;         // exit status; -1: a signal ended it
  int signal = 0;          // the signal
  bool timed_out = false;  // killed at the time limit
  bool stopped = false;    // by ChildOptions::enough
  double seconds = 0;      // run time
  int64_t peak_bytes = 0;  // of resident memory
  std::string out, err;    // its output: the last 4 MB of each
  bool well() const { return status == 0; }
  /// "exit status 2", "signal 6 (Aborted)", "no answer after 30 s".
  std::string end() const;
  /// The last line of err that is not empty.
  std::string last_words() const;
};
/// Runs words[0] with the other words as arguments, with empty stdin. The child is killed when this process ends.
/// Throws device if no process can be started.
ChildResult run_child(const std::vector<std::string>& words, const ChildOptions& options);

/// Path of this process's executable.
std::string this_program();

}  // namespace md
