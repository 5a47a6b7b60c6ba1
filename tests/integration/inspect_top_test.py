"""mlpo-ctl top, with real daemons. Arguments: the folder of the programs, and which tests, if not all."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unittest

from inspected import BIN, CLEAN, DEADLINE, Case, Daemon, ctl


class Top(Case):
    def test_frames(self) -> None:
        daemon = self.daemon()
        self.train(daemon)
        shown = ctl("top", "--once", "--socket", daemon.socket)
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertNotIn("\033", shown.stdout)
        for word in ("pool:", "PATH", "one", "two", "sessions: 0 of 0"):
            self.assertIn(word, shown.stdout)
        told = json.loads(ctl("top", "--once", "--json", "--socket", daemon.socket).stdout)
        self.assertEqual(told["steps"]["ended"], 3)
        self.assertEqual([path["name"] for path in told["paths"]], ["one", "two"])
        gone = ctl("top", "--once", "--socket", str(self.folder / "none"))
        self.assertEqual(gone.returncode, 69)

    def live(self, daemon: Daemon, term: str) -> tuple[subprocess.Popen[bytes], int, list[object]]:
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        before = termios.tcgetattr(ours)
        command = [BIN / "mlpo-ctl", "top", "--interval", "0.1", "--socket", daemon.socket]
        top = subprocess.Popen(
            command, env=CLEAN | {"TERM": term}, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.addCleanup(top.wait)
        self.addCleanup(top.kill)
        return top, ours, before

    def until(self, terminal: int, text: bytes) -> bytes:
        shown = b""
        end = time.monotonic() + DEADLINE
        while text not in shown:
            if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not come in time: {shown!r}")
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
        self.assertIn(text, shown)
        return shown

    def test_the_terminal_is_given_back(self) -> None:
        daemon = self.daemon()
        for way in ("interrupt", "q", "the daemon goes"):
            with self.subTest(way):
                top, terminal, before = self.live(daemon, "xterm")
                self.until(terminal, b"\033[?1049h")
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 30, 0, 0))
                top.send_signal(signal.SIGWINCH)
                self.until(terminal, b"\033[J")
                for line in re.split(rb"[\r\n]+", self.until(terminal, b"\033[J").split(b"\033[H")[-1]):
                    self.assertLessEqual(len(re.sub(rb"\033\[[0-9;?]*[A-Za-z]", b"", line)), 30)
                if way == "interrupt":
                    top.send_signal(signal.SIGINT)
                elif way == "q":
                    os.write(terminal, b"q")
                else:
                    daemon.end()
                shown = self.until(terminal, b"\033[?1049l" if way != "the daemon goes" else b"the daemon has gone")
                self.assertIn(b"\033[?25h", shown)
                self.assertEqual(top.wait(DEADLINE), 69 if way == "the daemon goes" else 0)
                self.assertEqual(termios.tcgetattr(terminal)[:4], before[:4])

    def test_a_stuck_daemon_is_not_waited_for(self) -> None:
        daemon = self.daemon()
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            with self.subTest(number.name):
                top, terminal, before = self.live(daemon, "xterm")
                self.until(terminal, b"\033[J")
                self.assertNotEqual(termios.tcgetattr(terminal)[:4], before[:4])
                daemon.process.send_signal(signal.SIGSTOP)
                try:
                    time.sleep(0.3)  # it asks for the next frame, in vain
                    top.send_signal(number)
                    self.assertEqual(top.wait(5), 0)  # of the 15 s that it waits for an answer
                    self.until(terminal, b"\033[?25h\033[?1049l")
                    self.assertEqual(termios.tcgetattr(terminal)[:4], before[:4])
                finally:
                    daemon.process.send_signal(signal.SIGCONT)

    def test_a_dumb_terminal(self) -> None:
        daemon = self.daemon()
        top, terminal, _ = self.live(daemon, "dumb")
        shown = self.until(terminal, b"sessions:")
        shown += self.until(terminal, b"sessions:")  # the next frame
        self.assertNotIn(b"\033", shown)
        top.send_signal(signal.SIGINT)
        self.assertEqual(top.wait(DEADLINE), 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
