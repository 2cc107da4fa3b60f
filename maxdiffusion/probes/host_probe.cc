#include "maxdiffusion/probes/host_probe.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gnu/libc-version.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/address_space.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/base/this_machine.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/kernels/processor.h"
#include "maxdiffusion/probes/child.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/processes/tpu_workers.h"
#include "maxdiffusion/storage/hub.h"
#include "maxdiffusion/storage/location.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kGib = int64_t{1} << 30;

int64_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : ::sysconf(_SC_NPROCESSORS_ONLN);
}

/// Number of cores that a version 2 cgroup allows; 0: unlimited.
double granted_cores() {
  std::ifstream in("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(in >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::stod(quota) / period;
}

/// The folder, or its nearest existing ancestor.
std::string nearest_folder(const std::string& folder) {
  fs::path at = fs::absolute(folder);
  std::error_code ec;
  while (!fs::exists(fs::symlink_status(at, ec)) && at.has_relative_path()) at = at.parent_path();
  return at.string();
}

/// The first line of a child's output, parsed as an object.
json line_of(const ChildResult& r) { return parse_json_or_discard(r.out.substr(0, r.out.find('\n'))); }

void print_json(const json& line) {
  fmt::print("{}\n", dump_json(line));
  std::fflush(stdout);
}

enum class Reach { connects, refuses, silent, unknown };
/// Tries a TCP connection to a host, with a timeout of three seconds.
Reach reach(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return Reach::unknown;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  (void)::connect(fd, found->ai_addr, found->ai_addrlen);
  pollfd end{fd, POLLOUT, 0};
  const bool ended = ::poll(&end, 1, 3000) > 0;
  int why = 0;
  socklen_t size = sizeof why;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &size);
  ::close(fd);
  return !ended ? Reach::silent : why == 0 ? Reach::connects : why == ECONNREFUSED ? Reach::refuses : Reach::silent;
}

bool is_free(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_ANY);
  a.sin_port = htons(static_cast<uint16_t>(port));
  const bool free = ::bind(fd, reinterpret_cast<const sockaddr*>(&a), sizeof a) == 0;
  ::close(fd);
  return free;
}

}  // namespace

Findings probe_system() {
  utsname name{};
  ::uname(&name);
  return {ok("system", fmt::format("maxdiffusion {}, {} {} {}, glibc {}", version(), name.sysname, name.release,
                                   name.machine, gnu_get_libc_version()))};
}

void show_processor() { print_json({{"isa", processor().isa}, {"bf16", processor().bf16_products}}); }

Findings probe_processor() {
#if defined(__x86_64__)
  constexpr bool kHasAvx = true;
#else
  constexpr bool kHasAvx = false;  // other architectures do not need it
#endif
  const std::string flags = " " + cpuinfo("flags") + " ";
  std::vector<std::string> has;
  for (const auto& [flag, shown] :
       {std::pair{"avx2", "AVX2"}, {"avx512f", "AVX-512"}, {"avx512_bf16", "its bf16"}, {"amx_bf16", "AMX"}})
    if (flags.find(std::string(" ") + flag + " ") != flags.npos) has.push_back(shown);
  std::string found = fmt::format("{}, {}", processor_name(), counted(usable_cores(), "core"));
  if (const double granted = granted_cores(); granted > 0)
    found += fmt::format(" (of which a cgroup grants {:.1f})", granted);
  if (kHasAvx) found += fmt::format("; has {}", has.empty() ? "no AVX2" : fmt::format("{}", fmt::join(has, ", ")));
  const ChildResult r = run_child({this_program(), "doctor", "probe=processor"}, {.seconds = 30});
  const json report = line_of(r);
  if (!r.well() || !report.is_object())
    return {error("processor", fmt::format("{}; kernels fail on it: {}", found, r.end()),
                  "another machine; this one's processor lacks what oneDNN needs")};
  found +=
      fmt::format("; kernels use {}{}", report.value("isa", "?"), report.value("bf16", false) ? " and its bf16" : "");
  if (kHasAvx && has.empty())
    return {warning("processor", found, "a machine with AVX2, which trains several times faster")};
  return {ok("processor", found)};
}

Findings probe_memory() {
  const int64_t all = ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE), limit = memory_limit(), free = free_memory();
  std::string found = fmt::format("{} of the machine", bytes_text(all));
  if (limit < all) found += fmt::format(", {} for this process by a limit", bytes_text(limit));
  found += fmt::format(", {} free", bytes_text(free));
  if (const auto left = address_space_left(); left && *left < 4 * kGib)
    return {error("memory", fmt::format("{}; ulimit -v leaves {} of address space", found, bytes_text(*left)),
                  "ulimit -v unlimited", Code::out_of_memory)};
  if (limit < 2 * kGib)
    return {
        error("memory", fmt::format("{}; the quickstart needs 2 GiB", found),
              limit < all ? "a larger limit of the container (docker run --memory=8g …)" : "a machine with more memory",
              Code::out_of_memory)};
  if (free < 3 * kGib) return {warning("memory", found, "ps aux --sort=-rss | head, which shows what uses it")};
  return {ok("memory", found)};
}

Findings probe_limits() {
  Findings out;
  rlimit files{}, size{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const std::string open = files.rlim_cur == RLIM_INFINITY ? "no limit" : fmt::format("{}", files.rlim_cur);
  if (files.rlim_cur < 1024)
    out.push_back(warning("open files", open + "; datasets and checkpoints of many parts need more", "ulimit -n 4096"));
  else
    out.push_back(ok("open files", open));
  ::getrlimit(RLIMIT_FSIZE, &size);
  if (size.rlim_cur != RLIM_INFINITY)
    out.push_back(error("size of files",
                        fmt::format("a limit (ulimit -f) of {}", bytes_text(static_cast<int64_t>(size.rlim_cur))),
                        "ulimit -f unlimited", Code::io));
  return out;
}

void show_folder(const std::string& folder) {
  const std::string at = nearest_folder(folder);
  json report = {{"at", at}};
  const auto failed = [&](const char* what, int why) {
    report["failed"] = fmt::format("{}: {}", what, std::strerror(why));
    report["errno"] = why;
    print_json(report);
  };
  struct statvfs disk {};
  if (::statvfs(at.c_str(), &disk) != 0) return failed("it cannot be opened", errno);
  report["free"] = static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
  if (DIR* d = ::opendir(at.c_str()))
    ::closedir(d);
  else
    return failed("it cannot be read", errno);
  // 64 MiB, or a quarter of the free space.
  const int64_t bytes = std::min<int64_t>(int64_t{64} << 20, report["free"].get<int64_t>() / 4);
  const std::string file = fmt::format("{}/.doctor-{}", at, ::getpid());
  const int fd = ::open(file.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return failed("no file can be written into it", errno);
  ::unlink(file.c_str());
  const std::string block(1 << 20, 'x');
  const auto start = std::chrono::steady_clock::now();
  int64_t written = 0;
  int why = 0;
  while (why == 0 && written < std::max<int64_t>(bytes, 4096)) {
    const auto n = ::write(fd, block.data(),
                           static_cast<size_t>(std::min<int64_t>(std::max<int64_t>(bytes, 4096) - written, 1 << 20)));
    if (n <= 0)
      why = n < 0 ? errno : ENOSPC;
    else
      written += n;
  }
  if (why == 0 && ::fsync(fd) != 0) why = errno;
  ::close(fd);
  if (why != 0) return failed("a file cannot be written", why);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report["rate"] = static_cast<double>(written) / std::max(seconds, 1e-6);
  report["written"] = written;
  print_json(report);
}

Findings probe_folder(const FolderProbe& p) {
  if (p.folder.empty()) return {};
  if (is_remote(p.folder))
    return {ok(p.name, fmt::format("{}: an object store, not probed here; `check` writes to it", shown(p.folder)))};
  const ChildResult r = run_child({this_program(), "doctor", "probe=folder", p.folder}, {.seconds = p.seconds});
  const json report = line_of(r);
  const std::string elsewhere = fmt::format("{}=FOLDER on another disk", p.key);
  if (!report.is_object())
    return {error(p.name, fmt::format("{}: {} while it was written to", p.folder, r.end()), elsewhere, Code::io)};
  std::string found = p.folder;
  if (report.value("at", "") != fs::absolute(p.folder).string())
    found += fmt::format(" (to be made in {})", report.value("at", ""));
  const int64_t free = report.value("free", int64_t{0});
  const std::string largest = fmt::format("du -xh -d 2 {} | sort -h | tail, which shows what uses it; or {}",
                                          report.value("at", ""), elsewhere);
  if (report.contains("failed")) {
    const int why = report.value("errno", 0);
    const std::string owner = fmt::format("{}; or sudo chown -R $USER {}", elsewhere, report.value("at", ""));
    return {error(p.name,
                  fmt::format("{}: {}; {} are free", found, report["failed"].get<std::string>(), bytes_text(free)),
                  why == EFBIG                    ? "ulimit -f unlimited"
                  : why == ENOSPC                 ? largest
                  : why == EACCES || why == EPERM ? owner
                                                  : elsewhere,
                  Code::io)};
  }
  found += fmt::format(": {} free", bytes_text(free));
  if (report.value("written", int64_t{0}) >= (int64_t{16} << 20))
    found += fmt::format(", {:.0f} MB/s written", report.value("rate", 0.0) / 1e6);
  if (free < p.required_bytes)
    return {error(p.name,
                  fmt::format("{}; the disk is full: at least {} are needed", found, bytes_text(p.required_bytes)),
                  largest, Code::io)};
  if (free < 10 * p.required_bytes) return {warning(p.name, found, largest)};
  return {ok(p.name, found)};
}

Findings probe_hub(double seconds) {
  const std::string cache = fs::path(cache_entry({.repository = "a/b"})).parent_path();
  Findings out = probe_folder({"hub cache", cache, "HF_HUB_CACHE", 1 << 20, seconds});
  int64_t repositories = 0;
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(cache, ec))
    if (const std::string name = f.path().filename(); name.starts_with("models--") || name.starts_with("datasets--"))
      ++repositories;
  try {
    out.push_back(
        ok("hub", fmt::format("{} cached; a token is {}; {}",
                              repositories == 1 ? "1 repository is" : fmt::format("{} repositories are", repositories),
                              hub_token().empty() ? "not given" : "given",
                              hub_is_offline() ? "HF_HUB_OFFLINE forbids downloads" : "downloads are allowed")));
  } catch (const Error& e) {
    out.push_back(from_error("hub", e, "HF_TOKEN_PATH=FILE that can be read"));
  }
  return out;
}

void show_mpi() { print_json({{"why", mpi_problem()}}); }

Findings probe_mpi(double seconds) {
  const ChildResult r = run_child({this_program(), "doctor", "probe=mpi"}, {.seconds = seconds});
  const json report = line_of(r);
  const std::string why = r.well() && report.is_object() ? report.value("why", "") : r.end();
  if (!why.empty())
    return {warning("mpi", fmt::format("several processes cannot be started: {}", why), "apt-get install mpich")};
  return {ok("mpi", "MPICH's library opens; mpiexec -n 2 … starts two processes")};
}

Findings probe_hosts() {
  Launch launch;
  try {
    launch = tpu_worker_of([](const char* name) { return std::getenv(name); },
                           [](const std::string&) { return std::nullopt; });
  } catch (const Error& e) {
    return {from_error("hosts", e, "env | grep -E 'TPU_WORKER|MEGASCALE', which shows what the environment says")};
  }
  if (launch.count == 1) return {};
  if (launch.rank == 0)
    return {is_free(kTpuPort)
                ? ok("hosts", fmt::format("process 0 of {}; port {} is free for the others", launch.count, kTpuPort))
                : error("hosts", fmt::format("port {}, at which the others connect to process 0, is in use", kTpuPort),
                        fmt::format("ss -ltnp 'sport = :{}', which names the process that holds it", kTpuPort))};
  const std::string what = fmt::format("process 0 of {} at {}:{}", launch.count, launch.coordinator, kTpuPort);
  switch (reach(launch.coordinator, kTpuPort)) {
    case Reach::connects: return {ok("hosts", what + " answers")};
    case Reach::refuses: return {ok("hosts", what + " can be reached; nothing listens there before a run starts")};
    case Reach::unknown:
      return {error("hosts", fmt::format("the address of {} cannot be resolved", launch.coordinator),
                    fmt::format("getent hosts {}", launch.coordinator))};
    case Reach::silent: break;
  }
  return {error("hosts", what + " does not answer",
                fmt::format("a rule of the firewall that allows TCP to port {} between the hosts", kTpuPort))};
}

}  // namespace md
