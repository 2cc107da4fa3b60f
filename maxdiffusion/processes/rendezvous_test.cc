// Rendezvous of several processes, and lost processes; here each process is a thread.
#include "maxdiffusion/processes/rendezvous.h"

#include <gtest/gtest.h>

#include <future>
#include <map>
#include <mutex>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/processes/launch.h"

namespace md {
namespace {

using namespace std::chrono_literals;

/// All members of one job's rendezvous, each joined.
struct Job {
  std::vector<std::unique_ptr<Rendezvous>> meetings;
  std::mutex mutex;
  std::map<int64_t, std::string> lost;  // by the rank that learned of it

  explicit Job(int64_t n, std::chrono::milliseconds limit = 6000ms) {
    for (int64_t r = 0; r < n; ++r)
      meetings.push_back(std::make_unique<Rendezvous>(RendezvousOptions{.rank = r,
                                                                        .count = n,
                                                                        .secret = "of this test",
                                                                        .beat = 50ms,
                                                                        .limit = limit,
                                                                        .exit_grace = 50ms,
                                                                        .lost = [this, r](const std::string& why) {
                                                                          std::lock_guard lock(mutex);
                                                                          lost[r] = why;
                                                                        }}));
    const std::string address = meetings[0]->address();
    std::vector<std::future<void>> joins;
    for (auto& rendezvous : meetings)
      joins.push_back(std::async(std::launch::async, [&] { rendezvous->join(address); }));
    for (auto& j : joins) j.get();
  }
  template <class F>
  void each(F&& act) {
    std::vector<std::future<void>> all;
    for (size_t r = 0; r < meetings.size(); ++r)
      all.push_back(std::async(std::launch::async, [&, r] { act(static_cast<int64_t>(r), *meetings[r]); }));
    for (auto& a : all) a.get();
  }
  std::string received(int64_t rank) {
    for (int i = 0; i < 500; ++i) {
      {
        std::lock_guard lock(mutex);
        if (lost.contains(rank)) return lost[rank];
      }
      std::this_thread::sleep_for(10ms);
    }
    return "nothing";
  }
};

TEST(Rendezvous, GathersTextsByRankAndTopic) {
  Job job(4);
  job.each([](int64_t rank, Rendezvous& rendezvous) {
    std::jthread other([&] {
      for (int i = 0; i < 50; ++i) rendezvous.gather("another", std::to_string(i));
    });
    for (int i = 0; i < 50; ++i) {
      const auto all = rendezvous.gather("topic", fmt::format("{}:{}\n", rank, i));
      for (int64_t r = 0; r < 4; ++r) EXPECT_EQ(all.at(static_cast<size_t>(r)), fmt::format("{}:{}\n", r, i));
    }
    other.join();
    EXPECT_EQ(rendezvous.gather("large", std::string(1 << 20, 'x')).at(3).size(), size_t{1} << 20);
    rendezvous.gather("end", "");
    rendezvous.leave(true);
  });
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Rendezvous, GathersAtProcessZero) {
  Job job(3);
  job.each([](int64_t rank, Rendezvous& rendezvous) {
    const std::string mine = std::string(1 << 20, static_cast<char>('a' + rank));
    for (int i = 0; i < 3; ++i) {
      const auto received = rendezvous.gather("to the leader", rank == 0 ? fmt::format("plan {}", i) : mine, true);
      ASSERT_EQ(received.size(), rank == 0 ? 3u : 1u);
      EXPECT_EQ(received[0], fmt::format("plan {}", i));
      if (rank == 0) {
        EXPECT_EQ(received[1], std::string(1 << 20, 'b'));
        EXPECT_EQ(received[2], std::string(1 << 20, 'c'));
      }
    }
    rendezvous.gather("end", "");
    rendezvous.leave(true);
  });
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Rendezvous, GivesEveryProcessWhatAnotherHasPut) {
  Job job(3);
  job.each([](int64_t rank, Rendezvous& rendezvous) {
    const std::string bytes("\0\n:\xff", 4), odd(300, ':');
    EXPECT_EQ(rendezvous.get("nobody"), std::nullopt);
    rendezvous.put(fmt::format("of {}", rank), bytes + std::to_string(rank));
    if (rank == 1) rendezvous.put(odd, "");
    rendezvous.gather("all have put", "");
    std::jthread other([&] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(rendezvous.get(odd), "");
      }
    });
    for (int i = 0; i < 50; ++i) {
      for (int64_t r = 0; r < 3; ++r) {
        EXPECT_EQ(rendezvous.get(fmt::format("of {}", r)), bytes + std::to_string(r));
      }
    }
    other.join();
    EXPECT_EQ(rendezvous.get("nobody"), std::nullopt);
    rendezvous.gather("end", "");
    rendezvous.leave(true);
  });
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Rendezvous, FailedProcessEndsAllWaits) {
  for (int64_t bad : {0, 2}) {
    Job job(3);
    job.each([&](int64_t rank, Rendezvous& rendezvous) {
      if (rank == bad) return rendezvous.leave(false);
      try {
        rendezvous.gather("never", "");
        ADD_FAILURE() << "process " << rank << " did not notice";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Code::device);
        EXPECT_NE(e.message().find(fmt::format("process {} (", bad)), std::string::npos) << e.message();
      }
    });
    for (int64_t r = 0; r < 3; ++r)
      if (r != bad) {
        EXPECT_NE(job.received(r).find(fmt::format("process {} (", bad)), std::string::npos) << job.received(r);
      }
  }
}

TEST(Rendezvous, AProcessThatLeavesWellIsNotMissed) {
  Job job(3);
  job.each([](int64_t rank, Rendezvous& rendezvous) {
    rendezvous.gather("end", "");
    if (rank > 0) rendezvous.leave(true);
  });
  std::this_thread::sleep_for(200ms);
  job.meetings[0]->leave(true);
  EXPECT_TRUE(job.lost.empty()) << job.lost.begin()->second;
}

TEST(Rendezvous, AStrangerDoesNotJoin) {
  Rendezvous coordinator({.rank = 0, .count = 2, .secret = "right", .joining = 300ms});
  Rendezvous stranger({.rank = 1, .count = 2, .secret = "wrong", .joining = 300ms});
  auto joined = std::async(std::launch::async, [&] { stranger.join(coordinator.address()); });
  EXPECT_THROW(coordinator.join(coordinator.address()), Error);
  EXPECT_THROW(joined.get(), Error);
}

TEST(Launch, IsReadFromWhatTheLauncherSets) {
  auto with = [](std::map<std::string, std::string> variables) {
    return launch_of([variables = std::move(variables)](const char* name) {
      const auto v = variables.find(name);
      return v == variables.end() ? nullptr : v->second.c_str();
    });
  };
  EXPECT_EQ(with({}).count, 1);
  EXPECT_EQ(with({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}).rank, 2);
  EXPECT_EQ(with({{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}).count, 4);
  EXPECT_THROW(with({{"PMI_RANK", "4"}, {"PMI_SIZE", "4"}}), Error);
  EXPECT_THROW(with({{"PMI_RANK", "x"}, {"PMI_SIZE", "4"}}), Error);
  EXPECT_THROW(with({{"OMPI_COMM_WORLD_SIZE", "2"}}), Error);
}

}  // namespace
}  // namespace md
