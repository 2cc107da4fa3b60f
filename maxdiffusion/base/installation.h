// Where this program is installed, what is installed with it, and the command that starts it. Folders are found at run
// time, relative to the program's own, so that an installation can be moved.
#pragma once

#include <string>
#include <vector>

namespace md {

/// The command that started this program: "./run" if a checkout's script did, else "maxdiffusion".
const std::string& program_name();

/// Path of one of this project's shared libraries. Searches the program's own folder (a build) and the folders of its
/// dynamic linker (PREFIX/lib/maxdiffusion). Returns `name` unchanged if neither has it.
std::string part_file(const std::string& name);

/// Path of a file installed with the program: PREFIX/share/maxdiffusion/NAME, or NAME in the checkout that the program
/// was built in. Empty if neither exists.
std::string shipped_file(const std::string& name);
/// As shipped_file; if there is none, the first of `others` that exists, else the first of `others`.
std::string shipped_file_or(const std::string& name, const std::vector<std::string>& others);

/// Folders that may hold unpacked wheels, best first: those installed with the program, that of its build, and the
/// packages of Pythons that the program is installed into.
const std::vector<std::string>& wheel_folders();
/// Path of a file of a wheel; empty if no folder has it.
std::string wheel_file(const std::string& name);

}  // namespace md
