// How a host of a slice finds its rank, from its environment or a metadata server; how hosts meet at a port known to
// all.
#include "maxdiffusion/processes/tpu_workers.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <future>
#include <map>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/processes/rendezvous.h"

namespace md {
namespace {

using Texts = std::map<std::string, std::string>;

Launch worker(const Texts& environment, const Texts& machine = {}) {
  return tpu_worker_of(
      [&](const char* name) {
        const auto found = environment.find(name);
        return found == environment.end() ? nullptr : found->second.c_str();
      },
      [&](const std::string& name) {
        const auto found = machine.find(name);
        return found == machine.end() ? std::nullopt : std::optional(found->second);
      });
}

void expect(const Launch& l, int64_t rank, int64_t count, const std::string& coordinator) {
  EXPECT_EQ(l.rank, rank);
  EXPECT_EQ(l.count, count);
  EXPECT_EQ(l.coordinator, coordinator);
}

// S3-19
TEST(TpuWorkers, AreReadFromEnvironmentOrMetadata) {
  expect(worker({}), 0, 1, "");
  EXPECT_EQ(worker({}).by, "");
  const Texts machine = {{"agent-worker-number", "1"},
                         {"worker-network-endpoints", "unknown:unknown:10.0.0.7,unknown:unknown:10.0.0.8"},
                         {"tpu-env", "ZONE: 'nowhere'\nHOST_BOUNDS: '1,1,2'\n"}};
  expect(worker({}, machine), 1, 2, "10.0.0.7");
  expect(worker({{"TPU_WORKER_ID", "2"}, {"TPU_WORKER_HOSTNAMES", "t-0,t-1,t-2"}}, machine), 2, 3, "t-0");
  expect(worker({{"TPU_WORKER_ID", "0"}, {"TPU_WORKER_HOSTNAMES", "localhost"}}), 0, 1, "localhost");
}

// S3-19
TEST(TpuWorkers, OfSeveralSlicesAreNumberedBySlice) {
  const Texts two = {{"TPU_WORKER_ID", "1"}, {"TPU_WORKER_HOSTNAMES", "b-0,b-1"}};
  Texts sliced = two;
  sliced.merge(
      Texts{{"MEGASCALE_NUM_SLICES", "3"}, {"MEGASCALE_SLICE_ID", "2"}, {"MEGASCALE_COORDINATOR_ADDRESS", "a-0:8081"}});
  expect(worker(sliced), 5, 6, "a-0");
  const Texts machine = {{"agent-worker-number", "0"},
                         {"worker-network-endpoints", "u:u:10.0.0.9"},
                         {"tpu-env",
                          "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\r\n"
                          "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.5:8080'\n"}};
  expect(worker({}, machine), 1, 2, "10.0.0.5");
}

TEST(TpuWorkers, ThatContradictThemselvesAreRefused) {
  const auto refusal = [](const Texts& environment, const Texts& machine) -> std::string {
    try {
      worker(environment, machine);
      return "none";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      return e.what();
    }
  };
  EXPECT_NE(refusal({{"TPU_WORKER_ID", "2"}, {"TPU_WORKER_HOSTNAMES", "a,b"}}, {})
                .find("TPU_WORKER_ID is '2'; expected a number below 2"),
            std::string::npos);
  EXPECT_NE(refusal({}, {{"agent-worker-number", "x"}, {"worker-network-endpoints", "u:u:1.2.3.4"}})
                .find("agent-worker-number is 'x'"),
            std::string::npos);
  EXPECT_NE(refusal({}, {{"agent-worker-number", "0"}, {"worker-network-endpoints", "10.0.0.1"}})
                .find("worker-network-endpoints has '10.0.0.1'"),
            std::string::npos);
}

/// Listens on a free port of this machine.
struct Listener {
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), port = 0;
  Listener() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(::listen(fd, 8), 0);
    EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
    port = ntohs(at.sin_port);
  }
  ~Listener() { ::close(fd); }
};

TEST(TpuWorkers, MetadataRequestsHaveGooglesHeader) {
  const Listener listener;
  std::jthread server([&listener] {
    for (int i = 0; i < 2; ++i) {
      const int connection = ::accept(listener.fd, nullptr, nullptr);
      std::array<char, 4096> bytes{};
      std::string request;
      while (request.find("\r\n\r\n") == request.npos) {
        const ssize_t n = ::recv(connection, bytes.data(), bytes.size(), 0);
        if (n <= 0) break;
        request.append(bytes.data(), static_cast<size_t>(n));
      }
      const bool known =
          request.starts_with("GET /computeMetadata/v1/instance/attributes/agent-worker-number HTTP/1.0\r\n") &&
          request.find("\r\nMetadata-Flavor: Google\r\n") != request.npos;
      const std::string response =
          known ? "HTTP/1.1 200 OK\r\nContent-Type: application/text\r\n\r\n3" : "HTTP/1.1 404 Not Found\r\n\r\nno";
      EXPECT_EQ(::send(connection, response.data(), response.size(), MSG_NOSIGNAL), std::ssize(response));
      ::close(connection);
    }
  });
  const std::string host = "127.0.0.1:" + std::to_string(listener.port);
  EXPECT_EQ(google_metadata(host, "agent-worker-number"), "3");
  EXPECT_EQ(google_metadata(host, "tpu-env"), std::nullopt);
  server.join();
  EXPECT_EQ(google_metadata("127.0.0.1:1", "tpu-env"), std::nullopt);  // no server listens
}

// S3-19
TEST(TpuWorkers, MeetAtAFixedPortInAnyOrder) {
  int port = 0;
  {
    const Listener listener;
    port = listener.port;
  }
  const auto hub = [port](int64_t rank) {
    return std::make_unique<Rendezvous>(
        RendezvousOptions{.rank = rank, .count = 2, .port = port, .secret = "s", .lost = [](const std::string&) {}});
  };
  auto second = std::async(std::launch::async, [&] {
    const auto h = hub(1);
    h->join(Rendezvous::address_of("localhost", port));
    std::vector<std::string> all = h->gather("meet", "b");
    h->leave(true);
    return all;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // process 0 starts last
  const auto first = hub(0);
  first->join("");
  EXPECT_EQ(first->gather("meet", "a"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(second.get(), (std::vector<std::string>{"a", "b"}));
  first->leave(true);
}

}  // namespace
}  // namespace md
