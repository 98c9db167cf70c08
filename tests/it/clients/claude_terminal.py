"""Runs `claude` twice in a pseudo-terminal, asks it something, and prints its answers."""

import json
import os
import pty
import re
import select
import sys
import time

TIMEOUT_S = 60


def settings():
    """Answers the questions of the first start: the theme, the key, and the trust in the directory."""
    path = os.path.expanduser("~/.claude.json")
    key = os.environ["ANTHROPIC_API_KEY"]
    answers = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "customApiKeyResponses": {"approved": [key[-20:]], "rejected": []},
        "projects": {os.getcwd(): {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}},
    }
    with open(path, "w") as file:
        json.dump(answers, file)


def ask():
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execvp("claude", ["claude"])
    drawn = ""
    typed = asked = False
    end = time.monotonic() + TIMEOUT_S
    answer = None
    while answer is None and time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 1)
        if ready:
            try:
                drawn += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break
        plain = re.sub(r"\x1b\[[0-9;?>=<]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07", "", drawn)
        # A return that arrives together with the text counts as part of a paste.
        if not typed and "\u276f" in plain:
            os.write(terminal, b"question")
            typed = True
        elif not asked and "question" in plain:
            os.write(terminal, b"\r")
            asked = True
        elif asked and "hello" in plain:
            answer = "hello"
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    if answer is None:
        sys.exit(drawn[-3000:])
    return answer


settings()
print(ask(), ask())
