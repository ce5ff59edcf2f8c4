"""What the tests of the command write and read."""

import json

CONTEXT = 256
TAU = ["--tau-conf", "0.3"]  # a random model is confident of nothing


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(path):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines_of(path)]


def prompts_file(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)
