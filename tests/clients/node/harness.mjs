// What the scripts share: where the endpoint is, a few prompts, and the loop over a script's checks. A check is a
// function whose name starts with check_; it passes if it returns. Each result is one line in the file CLIENT_REPORT.
import assert from "node:assert/strict";
import { appendFileSync, writeFileSync } from "node:fs";

export const {
  CLIENT_BASE_URL: BASE_URL,
  CLIENT_API_KEY: API_KEY,
  CLIENT_MODEL: MODEL,
  CLIENT_REPORT: REPORT,
} = process.env;
export const QUESTION = "What is the capital of France?";
// Asked greedily, the demo model goes on with these characters, each of which is spread over several tokens.
export const UNICODE_QUESTION = "Repeat:" + " 🦊 你好,".repeat(6);
export const LONG_TEXT = "word ".repeat(9000); // more tokens than the demo model's context of 8192
export const UNKNOWN_MODEL = "no-such-model";

export function assertUnicode(text) {
  assert.ok(text.includes("🦊 你好,"), text);
  assert.ok(!text.includes("\ufffd"), text);
}

// Runs `action`, which must reject with an error of class `kind`, and returns that error.
export async function rejects(kind, action) {
  try {
    await action();
  } catch (error) {
    assert.ok(error instanceof kind, `expected ${kind.name}, got ${error}`);
    return error;
  }
  throw new Error(`nothing was thrown, expected ${kind.name}`);
}

export async function run(checks) {
  writeFileSync(REPORT, "");
  for (const check of checks) {
    const started = performance.now();
    let error = null;
    try {
      await check();
    } catch (thrown) {
      error = thrown.stack ?? String(thrown);
    }
    const seconds = Math.round(performance.now() - started) / 1000;
    appendFileSync(REPORT, JSON.stringify({ check: check.name, error, seconds }) + "\n");
  }
}
