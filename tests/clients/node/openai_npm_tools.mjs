// The `openai` npm package with zod: parsed answers, tools, and its stream helper. Validity, not wisdom.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { API_KEY, BASE_URL, MODEL, run } from "./harness.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0, timeout: 120_000 });
const Forecast = z.object({ city: z.enum(["Paris", "Rome", "Oslo"]), days: z.int().min(1).max(7) });
const tools = [zodFunction({ name: "forecast", parameters: Forecast })];
const named = { type: "function", function: { name: "forecast" } };

function ask(options) {
  const messages = [{ role: "user", content: "How is the weather in Rome this week?" }];
  return { model: MODEL, messages, max_tokens: 80, temperature: 0, ...options };
}

async function check_parse() {
  const body = ask({ response_format: zodResponseFormat(Forecast, "forecast") });
  const { message } = (await client.chat.completions.parse(body)).choices[0];
  Forecast.parse(message.parsed);
  const streamed = await client.chat.completions.stream(body).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, message.parsed);
}

async function check_tools() {
  for (const tool_choice of ["required", named]) {
    const { message } = (await client.chat.completions.parse(ask({ tools, tool_choice }))).choices[0];
    assert.ok(message.tool_calls.length > 0);
    for (const call of message.tool_calls) Forecast.parse(call.function.parsed_arguments);
  }
}

async function check_streamed_tools() {
  for (const tool_choice of ["required", named]) {
    const whole = (await client.chat.completions.parse(ask({ tools, tool_choice }))).choices[0];
    const stream = client.chat.completions.stream(ask({ tools, tool_choice }));
    const fragments = [];
    stream.on("tool_calls.function.arguments.delta", (event) => fragments.push(event.arguments_delta));
    const final = (await stream.finalChatCompletion()).choices[0];
    const texts = (choice) => choice.message.tool_calls.map((call) => call.function.arguments);
    assert.deepEqual(texts(final), texts(whole));
    assert.equal(fragments.join(""), texts(whole).join(""));
    assert.equal(final.finish_reason, whole.finish_reason);
  }
}

async function check_run_tools() {
  const cities = [];
  const forecast = ({ city }) => cities.push(city) && "sun";
  const runnable = zodFunction({ name: "forecast", parameters: Forecast, function: forecast });
  await client.chat.completions.runTools(ask({ tools: [runnable], tool_choice: named })).done();
  assert.equal(cities.length, 1);
}

await run([check_parse, check_tools, check_streamed_tools, check_run_tools]);
