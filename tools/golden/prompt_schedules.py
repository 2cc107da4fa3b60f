"""Records what AUTOMATIC1111's web UI makes of prompts whose text changes between steps.

python3 tools/golden/prompt_schedules.py FOLDER, where FOLDER holds the web UI's modules/prompt_parser.py (version 1.10),
which needs the package lark, writes tests/golden/prompts/schedules.json: for each prompt its number of steps, and the
text of each step. The second pass (hires fix) has as many steps as the first and goes on counting.
"""

import json
import pathlib
import sys

sys.path.insert(0, sys.argv[1])
from prompt_parser import get_learned_conditioning_prompt_schedules  # noqa: E402

PROMPTS = [
    "test", "a [b:3]", "a [b: 3]", "a [b: 3 ]", "a [[[b]]:2]", "[(a:2):3]", "a [b : c : 1] d", "a[b:[c:d:2]:1]e",
    "a [unbalanced", "a [b:.5] c", "a [{b|d{:.5] c", "((a][:b:c [d:3]", "[a|(b:1.1)]", "[fe|]male", "[fe|||]male",
    "fantasy [mountain:lake:0.25] and [an oak:a tree:0.75][ in front::0.6][ behind:0.25] [shoddy:masterful:0.5]",
    "[a::0.4]b", "[a::4]", "[:b:4]", "[:4]", "[a:b:0]", "[a:b:0.0]", "[a:b:1.0]", "[a:b:1]", "[a:b:99]", "[a:b:-2]",
    "[a:b:-0.3]", "[a:b:+3]", "[a:b:2e0]", "[a:b:0.35]", "[a:b:.05]", "[a:b:c:0.5]", "[a|b:0.5]", "[[a|b]:c:0.5]",
    "[a|[b|c]]", "[a:[b|c]:2]", "[[a:b:2]:c:4]", "([a:b:3]:1.3) c", "(a [b:c:3])", "([a:b:3)]", "a | b [c:d:3]",
    "\\[a:b:3\\] [c:d:4]", "[a\\:b:3]", "[a\\]:b:3]", "a\\", "[a:b:3] c\\", "[]", "[|]", "[a|]", "[|a]", "()", "(:)",
    "[a:b:x]", "[a:b:3", "a]b[c:d:3]", ":[a:b:3]:", "[a :b\n: 3\n]", "[a(b:c:3]d)", "[(a:b):c:3]", "[a:(b:c):3]",
    "[a:b: 0.5 c]", "[3:4:2]", "[a:3:2]", "[3:2]", "[0.5]", "(red:1.3) BREAK [blue:green:0.5] BREAK [old]",
]
STEPS = [10, 7]

cases = []
for prompt in PROMPTS:
    for steps in STEPS:
        texts = []
        for hires in (None, steps):
            schedule = get_learned_conditioning_prompt_schedules([prompt], steps, hires)[0]
            for step in range(1, steps + 1):
                texts.append(next(text for end, text in schedule if step <= end))
        cases.append({"prompt": prompt, "steps": steps, "texts": texts})

to = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "prompts" / "schedules.json"
to.write_text(json.dumps(cases, separators=(",", ":"), ensure_ascii=False).replace("},{", "},\n{") + "\n")
print(len(cases), "cases", to.stat().st_size, "bytes")
