// Vercel's AI SDK: node ai_sdk.mjs BASE_URL MODEL (compatible | openai)
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError,
  generateText,
  Output,
  stepCountIs,
  streamText,
  tool,
  ToolLoopAgent,
} from "ai";
import { z } from "zod";

const [baseURL, modelName, kind] = process.argv.slice(2);
const server = { baseURL, apiKey: "none" };
const PROVIDERS = {
  // Chats, for any server that speaks OpenAI's API.
  compatible: () =>
    createOpenAICompatible({
      name: "tidemill",
      includeUsage: true,
      supportsStructuredOutputs: true,
      ...server,
    }),
  // The Responses API.
  openai: () => createOpenAI(server),
};
const PACKAGES = { compatible: "@ai-sdk/openai-compatible", openai: "@ai-sdk/openai" };
const provider = PROVIDERS[kind]();
const BRIEF = { model: provider(modelName), temperature: 0, maxOutputTokens: 80, maxRetries: 0 };
const QUESTION = "What is the capital of France?";
const City = z.object({
  name: z.enum(["Paris", "Oslo"]),
  is_capital: z.boolean(),
  districts: z.number().int().min(1).max(99),
});
const weather = tool({
  description: "Tell the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Oslo"]) }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
// What a weak model would not do by itself.
const callFirst = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });

async function aText() {
  const { text, finishReason, usage } = await generateText({ ...BRIEF, prompt: QUESTION });
  assert.match(text, /Paris/);
  assert.equal(finishReason, "stop");
  assert.equal(usage.inputTokens + usage.outputTokens, usage.totalTokens);
  return text;
}

async function aStreamTellsTheSame(text) {
  const result = streamText({ ...BRIEF, prompt: QUESTION });
  const parts = [];
  for await (const part of result.textStream) parts.push(part);
  assert.equal(parts.join(""), text);
  assert.ok(parts.length > 1, `${parts}`);
  assert.ok((await result.usage).outputTokens > 1);
}

async function aStreamIsLeft() {
  const left = new AbortController();
  const result = streamText({ ...BRIEF, prompt: QUESTION, abortSignal: left.signal });
  const kinds = [];
  for await (const part of result.fullStream) {
    kinds.push(part.type);
    if (part.type === "text-delta") left.abort();
  }
  assert.equal(kinds.at(-1), "abort");
}

async function aToolIsCalled() {
  const result = await generateText({
    ...BRIEF,
    prompt: "What is the weather in Paris?",
    tools: { weather },
    prepareStep: callFirst,
    stopWhen: stepCountIs(2),
  });
  const [first, second] = result.steps;
  assert.match(first.toolCalls[0].input.city, /^(Paris|Oslo)$/);
  assert.equal(first.finishReason, "tool-calls");
  assert.match(first.toolResults[0].output, /^It is sunny in/);
  assert.equal(second.text, result.text);
  assert.ok(result.text);
}

async function anAgentStreams() {
  const settings = { prepareStep: callFirst, stopWhen: stepCountIs(2) };
  const agent = new ToolLoopAgent({ ...BRIEF, tools: { weather }, ...settings });
  const result = await agent.stream({ prompt: "What is the weather in Paris?" });
  const kinds = [];
  for await (const part of result.fullStream) kinds.push(part.type);
  assert.ok(kinds.indexOf("tool-call") < kinds.indexOf("tool-result"));
  assert.ok(kinds.indexOf("tool-result") < kinds.indexOf("text-delta"));
  assert.ok(!kinds.includes("error"));
}

async function objectsFollowSchemas() {
  const asked = { ...BRIEF, prompt: "Paris is the capital of France. Describe it." };
  const output = Output.object({ schema: City });
  City.parse((await generateText({ ...asked, output })).output);
  const stream = streamText({ ...asked, output });
  const seen = [];
  for await (const part of stream.partialOutputStream) seen.push(part);
  assert.ok(seen.length > 1);
  City.parse(await stream.output);
  const choice = Output.choice({ options: ["sunny", "rainy"] });
  const { output: chosen } = await generateText({ ...asked, output: choice });
  assert.match(chosen, /^(sunny|rainy)$/);
}

async function anUnknownModelIsTold() {
  const asked = { ...BRIEF, model: provider("nonesuch"), prompt: QUESTION };
  await assert.rejects(generateText(asked), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /nonesuch/);
    assert.equal(error.isRetryable, false);
    return true;
  });
}

const text = await aText();
await aStreamTellsTheSame(text);
await aStreamIsLeft();
await aToolIsCalled();
await anAgentStreams();
await objectsFollowSchemas();
await anUnknownModelIsTold();
const versionOf = (name) =>
  JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
const version = `${versionOf(PACKAGES[kind])} (ai ${versionOf("ai")})`;
const ran = ["text", "stream", "aborted stream", "tools", "agent stream", "objects", "errors"];
console.log(JSON.stringify({ client: PACKAGES[kind], version, ran }));
