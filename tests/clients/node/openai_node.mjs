// OpenAI's client for Node: node openai_node.mjs BASE_URL MODEL
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI, { toFile } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none" });
const QUESTION = [{ role: "user", content: "What is the capital of France?" }];
const BRIEF = { model, temperature: 0, max_tokens: 80 };
const City = z.object({
  name: z.enum(["Paris", "Oslo"]),
  is_capital: z.boolean(),
  districts: z.number().int().min(1).max(99),
});
const WEATHER = {
  name: "weather",
  description: "Tell the weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

async function modelsAreListed() {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.ok(ids.includes(model), `${ids}`);
  assert.equal((await client.models.retrieve(model)).id, model);
}

async function aChat() {
  const answer = await client.chat.completions.create({ ...BRIEF, messages: QUESTION });
  const [choice] = answer.choices;
  assert.match(choice.message.content, /Paris/);
  assert.equal(choice.finish_reason, "stop");
  const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
  assert.equal(prompt_tokens + completion_tokens, total_tokens);
  return choice.message.content;
}

async function aStreamTellsTheSame(text) {
  const stream = await client.chat.completions.create({
    ...BRIEF,
    messages: QUESTION,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.ok(last.usage.completion_tokens > 1);
  assert.ok(chunks.length > 2);
  assert.equal(chunks.map((each) => each.choices[0].delta.content ?? "").join(""), text);
  const helper = client.chat.completions.stream({ ...BRIEF, messages: QUESTION });
  assert.equal(await helper.finalContent(), text);
}

async function aStreamIsLeft() {
  const asked = { ...BRIEF, max_tokens: 2000, messages: QUESTION, ignore_eos: true };
  const stream = await client.chat.completions.create({ ...asked, stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
}

async function aTextIsContinued() {
  const asked = { model, prompt: "The capital of France is", temperature: 0, max_tokens: 6 };
  const answer = await client.completions.create({ ...asked, logprobs: 1 });
  assert.match(answer.choices[0].text, /Paris/);
  assert.equal(answer.choices[0].logprobs.tokens.length, 6);
  let text = "";
  const stream = await client.completions.create({ ...asked, stream: true });
  for await (const chunk of stream) text += chunk.choices[0].text;
  assert.equal(text, answer.choices[0].text);
}

async function aToolIsCalled() {
  const messages = [{ role: "user", content: "What is the weather in Paris?" }];
  const tools = [{ type: "function", function: WEATHER }];
  const named = { type: "function", function: { name: "weather" } };
  const answer = await client.chat.completions.create({
    ...BRIEF,
    messages,
    tools,
    tool_choice: named,
  });
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.match(JSON.parse(call.function.arguments).city, /^(Paris|Oslo)$/);
  messages.push(answer.choices[0].message);
  messages.push({ role: "tool", tool_call_id: call.id, content: "It is sunny." });
  const last = await client.chat.completions.create({
    ...BRIEF,
    messages,
    tools,
    tool_choice: "none",
  });
  assert.ok(last.choices[0].message.content);
}

async function toolsAreRun() {
  const asked = [];
  const weather = ({ city }) => {
    asked.push(city);
    return "It is sunny.";
  };
  const runner = client.chat.completions.runTools(
    {
      ...BRIEF,
      stream: true,
      messages: [{ role: "user", content: "What is the weather in Paris?" }],
      tool_choice: { type: "function", function: { name: "weather" } },
      tools: [{ type: "function", function: { ...WEATHER, function: weather, parse: JSON.parse } }],
    },
    { maxChatCompletions: 1 },
  );
  await runner.done();
  assert.equal(asked.length, 1);
  assert.deepEqual(runner.messages.map((each) => each.role), ["user", "assistant", "tool"]);
}

async function schemasAreFollowed() {
  const messages = [{ role: "user", content: "Paris is the capital of France. Describe it." }];
  const answer = await client.chat.completions.parse({
    ...BRIEF,
    messages,
    response_format: zodResponseFormat(City, "city"),
  });
  City.parse(answer.choices[0].message.parsed);
}

async function responsesAreMade(text) {
  const asked = { model, input: QUESTION[0].content, temperature: 0, max_output_tokens: 80 };
  const response = await client.responses.create(asked);
  assert.equal(response.output_text, text);
  assert.equal((await client.responses.retrieve(response.id)).output_text, text);
  let streamed = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  assert.equal(streamed, text);
  const parsed = await client.responses.parse({
    ...asked,
    text: { format: zodTextFormat(City, "city") },
  });
  City.parse(parsed.output_parsed);
  const second = await client.responses.create({ ...asked, previous_response_id: response.id });
  assert.equal(second.previous_response_id, response.id);
  await client.responses.delete(response.id);
}

async function aBatchIsRun(text) {
  const line = (id) => ({
    custom_id: id,
    method: "POST",
    url: "/v1/chat/completions",
    body: { ...BRIEF, messages: QUESTION },
  });
  const lines = ["one", "two"].map((id) => JSON.stringify(line(id))).join("\n");
  const file = await client.files.create({
    file: await toFile(Buffer.from(lines), "chats.jsonl"),
    purpose: "batch",
  });
  assert.equal(await (await client.files.content(file.id)).text(), lines);
  let batch = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
  });
  while (["validating", "in_progress", "finalizing"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 200));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  const output = await (await client.files.content(batch.output_file_id)).text();
  const told = output.trim().split("\n").map((each) => JSON.parse(each));
  assert.deepEqual(told.map((each) => each.custom_id).sort(), ["one", "two"]);
  for (const each of told) {
    assert.equal(each.response.body.choices[0].message.content, text);
  }
  const batches = [];
  for await (const each of client.batches.list({ limit: 1 })) batches.push(each.id);
  assert.ok(batches.includes(batch.id));
  assert.ok((await client.files.delete(file.id)).deleted);
}

async function errorsAreToldApart() {
  const chat = (changes) =>
    client.chat.completions.create({ ...BRIEF, messages: QUESTION, ...changes });
  await assert.rejects(chat({ model: "nonesuch" }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
  await assert.rejects(chat({ temperature: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
}

await modelsAreListed();
const text = await aChat();
await aStreamTellsTheSame(text);
await aStreamIsLeft();
await aTextIsContinued();
await aToolIsCalled();
await toolsAreRun();
await schemasAreFollowed();
await responsesAreMade(text);
await aBatchIsRun(text);
await errorsAreToldApart();
const { version } = JSON.parse(
  readFileSync(new URL("node_modules/openai/package.json", import.meta.url)),
);
const ran = ["models", "chat", "stream", "aborted stream", "completion", "tools", "tool runner"];
ran.push("structured output", "responses", "files and batches", "errors");
console.log(JSON.stringify({ client: "openai (Node)", version, ran }));
