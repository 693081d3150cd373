// The `openai` npm package: chat, streams and their helper, completions, models, errors, raw answers.
import assert from "node:assert/strict";
import OpenAI from "openai";
import {
  API_KEY, BASE_URL, LONG_TEXT, MODEL, QUESTION, UNICODE_QUESTION, UNKNOWN_MODEL, assertUnicode, rejects, run,
} from "./harness.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0, timeout: 120_000 });

function ask(text = QUESTION, options = {}) {
  return { model: MODEL, messages: [{ role: "user", content: text }], max_tokens: 16, temperature: 0, ...options };
}

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

function textOf(chunks) {
  return chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta.content ?? "").join("");
}

async function check_chat() {
  const answer = await client.chat.completions.create(ask());
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.model, MODEL);
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.ok(answer.choices[0].message.content.trim());
  assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
}

async function check_streamed_chat() {
  const whole = await client.chat.completions.create(ask());
  const options = { stream: true, stream_options: { include_usage: true } };
  const chunks = await collect(await client.chat.completions.create(ask(QUESTION, options)));
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(textOf(chunks), whole.choices[0].message.content);
  assert.deepEqual(chunks.at(-1).usage, whole.usage);
  const reasons = chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.finish_reason).filter(Boolean);
  assert.deepEqual(reasons, [whole.choices[0].finish_reason]);
}

async function check_stream_helper() {
  const whole = await client.chat.completions.create(ask());
  const stream = client.chat.completions.stream(ask());
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
  assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
}

async function check_unicode_stream() {
  const options = { max_tokens: 30 };
  const whole = await client.chat.completions.create(ask(UNICODE_QUESTION, options));
  const chunks = await collect(await client.chat.completions.create(ask(UNICODE_QUESTION, { ...options, stream: true })));
  assertUnicode(textOf(chunks));
  assert.equal(textOf(chunks), whole.choices[0].message.content);
}

async function check_completions() {
  const body = { model: MODEL, prompt: "One, two, three,", max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create(body);
  const chunks = await collect(await client.completions.create({ ...body, stream: true }));
  assert.ok(whole.choices[0].text);
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
}

async function check_models() {
  const ids = (await collect(await client.models.list())).map((model) => model.id);
  assert.ok(ids.includes(MODEL));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
}

async function check_unknown_model() {
  for (const stream of [false, true]) {
    const body = ask(QUESTION, { model: UNKNOWN_MODEL, stream });
    const error = await rejects(OpenAI.NotFoundError, () => client.chat.completions.create(body));
    assert.equal(error.status, 404);
    assert.deepEqual([error.code, error.param, error.type], ["model_not_found", "model", "invalid_request_error"]);
  }
}

async function check_bad_temperature() {
  for (const stream of [false, true]) {
    const body = ask(QUESTION, { temperature: 3, stream });
    const error = await rejects(OpenAI.BadRequestError, () => client.chat.completions.create(body));
    assert.equal(error.param, "temperature");
  }
}

async function check_long_prompt() {
  const error = await rejects(OpenAI.BadRequestError, () => client.chat.completions.create(ask(LONG_TEXT)));
  assert.deepEqual([error.code, error.param], ["context_length_exceeded", "messages"]);
}

async function check_wrong_key() {
  const stranger = client.withOptions({ apiKey: "wrong" });
  const error = await rejects(OpenAI.AuthenticationError, () => stranger.chat.completions.create(ask()));
  assert.equal(error.code, "invalid_api_key");
}

async function check_timeout_and_aborted_stream_leave_the_endpoint_usable() {
  const long = ask("Count to a thousand.", { max_tokens: 1000 });
  await rejects(OpenAI.APIConnectionTimeoutError, () => client.chat.completions.create(long, { timeout: 200 }));
  const stream = await client.chat.completions.create({ ...long, stream: true });
  for await (const _ of stream) break;
  stream.controller.abort();
  assert.ok((await client.chat.completions.create(ask())).choices[0].message.content);
}

async function check_raw_response() {
  const { data, response, request_id } = await client.chat.completions.create(ask()).withResponse();
  assert.equal(response.status, 200);
  assert.ok(response.headers.get("content-type").startsWith("application/json"));
  assert.ok(request_id && data.id.endsWith(request_id), `${request_id} ${data.id}`);
}

await run([
  check_chat,
  check_streamed_chat,
  check_stream_helper,
  check_unicode_stream,
  check_completions,
  check_models,
  check_unknown_model,
  check_bad_temperature,
  check_long_prompt,
  check_wrong_key,
  check_timeout_and_aborted_stream_leave_the_endpoint_usable,
  check_raw_response,
]);
