// Jobs of small shell commands: exit codes, signals, survivors, and what they find in their environment.
#include "launch/launch.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "launch/progress.h"
#include "launch/rendezvous.h"

namespace halfwire {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class Launch : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/halfwire-launch-test-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  LaunchOptions job(const std::string& script, int ranks) {
    LaunchOptions options;
    options.command = {"bash", "-c", script};
    options.ranks = ranks > 0;
    for (int i = 0; i < std::max(ranks, 1); ++i) {
      auto environment = currentEnvironment();
      setVariable(&environment, "DIR", directory_);
      options.environments.push_back(ranks > 0 ? rankEnvironment(environment, i, ranks, 4242) : environment);
    }
    options.grace = milliseconds(1000);
    return options;
  }

  LaunchOutcome run(const LaunchOptions& options) {
    auto outcome = launch(options);
    EXPECT_TRUE(outcome.ok()) << outcome.status().message();
    return outcome.ok() ? outcome.value() : LaunchOutcome{};
  }

  std::string file(const std::string& name) const {
    std::ifstream in(directory_ + "/" + name);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  // Signals this process once `name` exists.
  std::thread signalWhen(const std::string& name, int signal) {
    return std::thread([this, name, signal] {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_BLOCK, &all, nullptr);  // only the launching thread is to get it
      for (int i = 0; i < 1000 && !std::filesystem::exists(directory_ + "/" + name); ++i) {
        std::this_thread::sleep_for(milliseconds(10));
      }
      kill(getpid(), signal);
    });
  }

  std::string directory_;
};

// Alive and not merely waiting to be reaped.
bool alive(const std::string& pid) {
  std::ifstream in("/proc/" + pid + "/stat");
  std::string text;
  std::getline(in, text);
  const size_t end = text.rfind(')');
  return end != std::string::npos && text[end + 2] != 'Z';
}

TEST_F(Launch, ExitCodes) {
  EXPECT_EQ(run(job("exit 0", 0)).exit_code, 0);
  EXPECT_EQ(run(job("exit 7", 0)).exit_code, 7);
  const LaunchOutcome killed = run(job("kill -9 $$", 0));
  EXPECT_EQ(killed.exit_code, 137);
  EXPECT_EQ(killed.signal, 9);
  EXPECT_EQ(run(job("exit 0", 4)).exit_code, 0);
  const LaunchOutcome one = run(job("[ $RANK = 2 ] && exit 5; sleep 30", 4));
  EXPECT_EQ(one.exit_code, 5);
  EXPECT_EQ(one.failed_rank, 2);
  EXPECT_EQ(one.killed, 0);
}

TEST_F(Launch, RanksSeeWhatTorchrunWouldSetAndAnEmptyInput) {
  run(job("echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT >$DIR/$RANK; cat",
          3));
  EXPECT_EQ(file("0"), "0 3 0 3 127.0.0.1 4242\n");
  EXPECT_EQ(file("2"), "2 3 2 3 127.0.0.1 4242\n");
}

TEST_F(Launch, SurvivorsOfADeadRankAreStopped) {
  const auto begin = std::chrono::steady_clock::now();
  const LaunchOutcome outcome =
      run(job("echo $$ >$DIR/$RANK; if [ $RANK = 1 ]; then\n"
              "while [ ! -s $DIR/0 ] || [ ! -s $DIR/2 ]; do sleep 0.02; done; kill -9 $$; fi; sleep 60",
              3));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_EQ(outcome.exit_code, 137);
  EXPECT_EQ(outcome.failed_rank, 1);
  for (const char* rank : {"0", "2"}) {
    std::string pid = file(rank);
    ASSERT_FALSE(pid.empty());
    pid.pop_back();
    EXPECT_FALSE(alive(pid)) << pid;
  }
}

TEST_F(Launch, WhoIgnoresTheRequestIsKilledWithItsChildren) {
  LaunchOptions options =
      job("[ $RANK = 1 ] && { while [ ! -s $DIR/pid ]; do sleep 0.02; done; exit 3; }\n"
          "trap '' TERM; (trap '' TERM; echo $BASHPID >$DIR/pid.tmp; mv $DIR/pid.tmp $DIR/pid; sleep 60; "
          "sleep 60) & wait; sleep 60",
          2);
  options.grace = milliseconds(300);
  const LaunchOutcome outcome = run(options);
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_EQ(outcome.killed, 1);
  std::string pid = file("pid");
  ASSERT_FALSE(pid.empty());
  pid.pop_back();
  EXPECT_FALSE(alive(pid));
}

TEST_F(Launch, OrphansInGroupsOfTheirOwnGoWithAFailedJob) {
  LaunchOptions options =
      job("setsid bash -c 'echo $$ >$DIR/pid.tmp; mv $DIR/pid.tmp $DIR/pid; sleep 60' &\n"
          "while [ ! -s $DIR/pid ]; do sleep 0.02; done; kill -9 $$",
          0);
  EXPECT_EQ(run(options).exit_code, 137);
  std::string pid = file("pid");
  ASSERT_FALSE(pid.empty());
  pid.pop_back();
  EXPECT_FALSE(alive(pid));
}

TEST_F(Launch, BackgroundProcessesOfAJobThatEndedWellAreLeftAlone) {
  EXPECT_EQ(run(job("sleep 60 & echo $! >$DIR/pid; exit 0", 0)).exit_code, 0);
  std::string pid = file("pid");
  ASSERT_FALSE(pid.empty());
  pid.pop_back();
  EXPECT_TRUE(alive(pid));
  kill(static_cast<pid_t>(std::stol(pid)), SIGKILL);
  waitpid(static_cast<pid_t>(std::stol(pid)), nullptr, 0);
}

TEST_F(Launch, SignalsArePassedOn) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const std::string name = signal == SIGTERM ? "TERM" : "USR1";
    std::filesystem::remove(directory_ + "/ready");
    std::thread sender = signalWhen("ready", signal);
    const LaunchOutcome outcome =
        run(job("trap 'exit 21' " + name + "; : >$DIR/ready; while :; do sleep 0.02; done", 0));
    sender.join();
    EXPECT_EQ(outcome.exit_code, 21) << name;
  }
}

TEST_F(Launch, ASignalReachesEveryRankAndItsChildren) {
  std::thread sender = signalWhen("ready2", SIGTERM);
  // The shells do not pass the signal on: their sleeps end because the group gets it.
  LaunchOptions options =
      job("trap 'echo got >$DIR/got$RANK; exit 9' TERM; : >$DIR/trap$RANK\n"
          "[ $RANK != 2 ] || while [ ! -e $DIR/trap0 ] || [ ! -e $DIR/trap1 ]; do sleep 0.02; done\n"
          ": >$DIR/ready$RANK; sleep 60",
          3);
  options.grace_after_signal = milliseconds(5000);
  const LaunchOutcome outcome = run(options);
  sender.join();
  EXPECT_EQ(outcome.exit_code, 9);
  EXPECT_EQ(outcome.killed, 0);
  EXPECT_EQ(file("got2"), "got\n");
}

TEST_F(Launch, ARankThatSavesItsStateAfterASignalGetsTheTime) {
  std::thread sender = signalWhen("ready1", SIGTERM);
  LaunchOptions options =
      job("if [ $RANK = 0 ]; then trap 'sleep 1; echo saved >$DIR/saved; exit 0' TERM; fi\n"
          "[ $RANK != 1 ] || while [ ! -e $DIR/ready0 ]; do sleep 0.02; done\n"
          ": >$DIR/ready$RANK; for i in {1..3000}; do sleep 0.02; done",
          2);
  options.grace = milliseconds(100);
  options.grace_after_signal = milliseconds(8000);
  const LaunchOutcome outcome = run(options);
  sender.join();
  EXPECT_EQ(outcome.exit_code, 143);
  EXPECT_EQ(outcome.terminated, 0);
  EXPECT_EQ(file("saved"), "saved\n");
}

TEST_F(Launch, AProgramThatCannotStartIsAnError) {
  for (const char* program : {"/nonexistent/program", "no-such-program-anywhere", "/etc/passwd", "/"}) {
    LaunchOptions options = job("", 2);
    options.command = {program};
    const auto outcome = launch(options);
    ASSERT_FALSE(outcome.ok()) << program;
    EXPECT_THAT(outcome.status().message(), HasSubstr("cannot start"));
  }
  EXPECT_FALSE(launch(LaunchOptions{}).ok());
}

TEST_F(Launch, TheCallerGetsItsSignalsBack) {
  sigset_t before, after;
  sigprocmask(SIG_BLOCK, nullptr, &before);
  run(job("exit 0", 2));
  sigprocmask(SIG_BLOCK, nullptr, &after);
  for (int s = 1; s < 32; ++s) EXPECT_EQ(sigismember(&before, s), sigismember(&after, s)) << s;
}

TEST_F(Launch, RanksDieWithTheirLauncher) {
  // A launcher in a process of its own is killed; its ranks must not survive it.
  const pid_t launcher = fork();
  if (launcher == 0) {
    (void)launch(job("echo $$ >$DIR/$RANK.tmp; mv $DIR/$RANK.tmp $DIR/$RANK; sleep 60", 2));
    _exit(0);
  }
  for (int i = 0; i < 500 && (file("0").empty() || file("1").empty()); ++i)
    std::this_thread::sleep_for(milliseconds(10));
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  for (const char* rank : {"0", "1"}) {
    std::string pid = file(rank);
    ASSERT_FALSE(pid.empty());
    pid.pop_back();
    for (int i = 0; i < 200 && alive(pid); ++i) std::this_thread::sleep_for(milliseconds(10));
    EXPECT_FALSE(alive(pid));
  }
}

TEST(Rendezvous, EveryRankGetsTheMessageDespiteStrangers) {
  const int port = freePort().value();
  const auto share = [port](int rank, std::string* message) {
    return shareFromRankZero({rank, 3, "127.0.0.1", port}, std::span(message->data(), message->size()), 10);
  };
  std::string messages[3] = {"a message for all", std::string(17, ' '), std::string(17, ' ')};
  Status statuses[3];
  std::vector<std::thread> ranks;
  ranks.emplace_back([&] { statuses[0] = share(0, &messages[0]); });
  // A stranger that says nothing and one that talks nonsense.
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int silent = socket(AF_INET, SOCK_STREAM, 0);
  const int rude = socket(AF_INET, SOCK_STREAM, 0);
  for (int i = 0; i < 200 && connect(rude, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(send(rude, "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL), 16);
  EXPECT_EQ(connect(silent, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  for (int rank : {1, 2}) {
    ranks.emplace_back([&, rank] { statuses[rank] = share(rank, &messages[rank]); });
  }
  for (std::thread& t : ranks) t.join();
  close(silent);
  close(rude);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(statuses[rank].ok()) << statuses[rank].message();
    EXPECT_EQ(messages[rank], messages[0]);
  }
}

TEST(Rendezvous, AMissingRankIsSaid) {
  std::string message = "x";
  const Status status =
      shareFromRankZero({0, 3, "127.0.0.1", freePort().value()}, std::span(message.data(), 1), 1);
  EXPECT_THAT(status.message(), HasSubstr("2 of 3 ranks did not come"));
  EXPECT_FALSE(shareFromRankZero({0, 2, "not-an-address", 1}, std::span(message.data(), 1), 1).ok());
}

TEST(Environment, SetUnsetFind) {
  std::vector<std::string> environment = {"A=1", "AB=2"};
  setVariable(&environment, "A", "x=y");
  EXPECT_STREQ(findVariable(environment, "A"), "x=y");
  EXPECT_STREQ(findVariable(environment, "AB"), "2");
  unsetVariable(&environment, "A");
  EXPECT_EQ(findVariable(environment, "A"), nullptr);
  EXPECT_EQ(environment.size(), 1u);
}

TEST(Progress, BarAndLines) {
  EXPECT_EQ(progressBar(5, 10, "loss 2", 10), "[#####-----]  5/10  loss 2");
  EXPECT_EQ(progressBar(12, 10, "", 4), "[####] 12/10  ");
  int lines = 0;
  for (uint64_t i = 1; i <= 137; ++i) lines += progressLineDue(i, 137, 10) ? 1 : 0;
  EXPECT_EQ(lines, 10);
  EXPECT_TRUE(progressLineDue(137, 137, 10));
  EXPECT_TRUE(progressLineDue(1, 1, 10));
}

}  // namespace
}  // namespace halfwire
