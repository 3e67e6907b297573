// npm's @ai-sdk/openai-compatible, as OpenCode uses it: text, stream, tools.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "thermocline", baseURL: `${url}/v1` });
const model = provider(name);
const prompt = "What is thermocline?";

const whole = await generateText({ model, prompt, maxOutputTokens: 100, maxRetries: 0 });
assert.match(whole.text, /mixture-of-experts/);
assert.equal(whole.finishReason, "stop");
assert.ok(whole.usage.outputTokens > 0);

const stream = streamText({ model, prompt, maxOutputTokens: 100, maxRetries: 0 });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);

const add = tool({
  description: "Adds.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { a: { type: "integer", minimum: 0, maximum: 9 } },
    required: ["a"],
    additionalProperties: false,
  }),
});
for (const run of [generateText, streamText]) {
  const called = await run({
    model,
    prompt,
    tools: { add },
    toolChoice: "required",
    maxOutputTokens: 100,
    maxRetries: 0,
  });
  const [call] = await called.toolCalls;
  assert.equal(call.toolName, "add");
  assert.ok(Number.isInteger(call.input.a));
}
