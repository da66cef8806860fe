"""Turn GSM8K as it is downloaded into rows for a recipe: `python gsm8k_rows.py train.jsonl gsm8k-train.jsonl`.

{"question", "answer": "worked solution … #### 1,080"} ──► {"prompt": [chat message], "answer": "1080", "solution": "…"}
"""

import json
import sys

ASK = "Think step by step, and put the final number in \\boxed{}."


def row(line: str) -> dict[str, object]:
    """One row of the recipe's file; columns other than `prompt` and `answer` come to rewards as metadata."""
    item = json.loads(line)
    solution, mark, final = item["answer"].rpartition("#### ")
    if not mark:
        raise SystemExit(f"no '#### ' before the final number in: {line[:80]}")
    content = f"{item['question']} {ASK}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "answer": final.strip().replace(",", ""),
        "solution": solution.strip(),
    }


if __name__ == "__main__":
    source, target = sys.argv[1:]
    with open(source, encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as rows:
        for line in lines:
            rows.write(json.dumps(row(line), ensure_ascii=False) + "\n")
