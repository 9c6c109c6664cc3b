// Streams one chat completion through the gateway with the official client; prints JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY });
const stream = await client.chat.completions.create({
  model: process.env.MODEL,
  messages: [{ role: "user", content: "Hello from Node." }],
  max_tokens: 12,
  stream: true,
});
let chunks = 0;
let text = "";
let finish = null;
for await (const chunk of stream) {
  chunks += 1;
  text += chunk.choices[0]?.delta?.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
}
console.log(JSON.stringify({ chunks, text, finish }));
