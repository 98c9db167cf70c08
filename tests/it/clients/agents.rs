//! Coding agents and agent frameworks, with scripted model APIs.

use super::model_apis::{ANTHROPIC, GOOGLE, OPENAI, Vendor, run_client};
use super::*;

/// A question, and nothing that asks or looks for updates.
pub(super) const AIDER_FLAGS: &str = "--message x --no-git --yes-always --no-check-update --no-analytics \
     --no-show-model-warnings --no-show-release-notes --no-pretty";
/// With a base URL of its own, the program asks how to authenticate.
pub(super) const GEMINI_SETTINGS: &str = "mkdir -p ~/.gemini; printf \
     '{\"security\":{\"auth\":{\"selectedType\":\"gemini-api-key\"}}}' > ~/.gemini/settings.json";

/// Runs a program twice, as its users do.
fn twice(command: &str) -> String {
    format!("printf '%s %s\\n' \"$({command})\" \"$({command})\"")
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs claude"]
async fn claude_code() {
    run_client("Claude Code, `claude -p`", &ANTHROPIC, &["sh", "-c", &twice("claude -p x")]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs codex"]
async fn codex() {
    let command = "codex exec --skip-git-repo-check -c openai_base_url=\"$OPENAI_BASE_URL\" x";
    // `codex exec` takes the key from a variable of its own.
    let vendor = Vendor { key: "CODEX_API_KEY", ..OPENAI };
    run_client("Codex CLI, `codex exec`", &vendor, &["sh", "-c", &twice(command)]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs gemini"]
async fn gemini_cli() {
    let script = format!("{GEMINI_SETTINGS}; {}", twice("gemini --skip-trust -m gemini-2.5-flash -p x"));
    run_client("Gemini CLI, `gemini -p`", &GOOGLE, &["sh", "-c", &script]).await;
}

/// The program is drawn on a terminal, so the words of its answer are searched for in what it has drawn.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs claude and python3"]
async fn claude_code_interactive() {
    let script = include_str!("claude_terminal.py");
    run_client("Claude Code, interactive", &ANTHROPIC, &["python3", "-c", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with claude-agent-sdk"]
async fn claude_agent_sdk() {
    let script = "import anyio\nfrom claude_agent_sdk import query, AssistantMessage, ClaudeAgentOptions, ClaudeSDKClient\n\
                  def texts(m): return [b.text for b in m.content] if isinstance(m, AssistantMessage) else []\n\
                  async def main():\n\
                  \x20   whole = [t async for m in query(prompt='x') for t in texts(m)]\n\
                  \x20   async with ClaudeSDKClient(options=ClaudeAgentOptions(include_partial_messages=True)) as c:\n\
                  \x20       await c.query('x')\n\
                  \x20       print(*whole, *[t async for m in c.receive_response() for t in texts(m)])\n\
                  anyio.run(main)";
    run_client("Claude Agent SDK for Python", &ANTHROPIC, &["python3", "-c", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs aider"]
async fn aider() {
    let program = clients().map_or("aider".into(), |clients| clients.join("aider/bin/aider"));
    for (vendor, model) in [(&OPENAI, "openai/m"), (&ANTHROPIC, "anthropic/m")] {
        let url = if vendor.key == OPENAI.key { "export OPENAI_API_BASE=$OPENAI_BASE_URL; " } else { "" };
        let one = |stream| {
            format!("{} --model {model} --{stream} {AIDER_FLAGS} </dev/null | grep -x hello", program.display())
        };
        let script = format!("{url}printf '%s %s\\n' \"$({})\" \"$({})\"", one("no-stream"), one("stream"));
        run_client(&format!("aider, `{model}`"), vendor, &["sh", "-c", &script]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with langchain-openai, langchain-anthropic and langgraph"]
async fn langchain() {
    for (vendor, model) in [
        (&OPENAI, "from langchain_openai import ChatOpenAI as Chat"),
        (&ANTHROPIC, "from langchain_anthropic import ChatAnthropic as Chat"),
    ] {
        let (class, script) = (
            model.split(' ').nth(3).unwrap(),
            format!(
                "{model}\nc = Chat(model='m')\nprint(c.invoke('x').text, end=' ')\n\
                 print(''.join(p.text for p in c.stream('x')))"
            ),
        );
        run_client(&format!("LangChain, `{class}`"), vendor, &["python3", "-c", &script]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with langchain-openai and langgraph"]
async fn langgraph() {
    let script = "from langchain_openai import ChatOpenAI\nfrom langgraph.graph import StateGraph, MessagesState, START\n\
                  model = ChatOpenAI(model='m')\ng = StateGraph(MessagesState)\n\
                  g.add_node('m', lambda s: {'messages': [model.invoke(s['messages'])]})\ng.add_edge(START, 'm')\n\
                  g = g.compile()\nasked = {'messages': [('user', 'x')]}\n\
                  print(g.invoke(asked)['messages'][-1].text, end=' ')\n\
                  print(''.join(p.text for p, _ in g.stream(asked, stream_mode='messages')))";
    run_client("LangGraph", &OPENAI, &["python3", "-c", script]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with openai-agents"]
async fn openai_agents() {
    let script = "import asyncio\nfrom agents import Agent, Runner\na = Agent(name='a', model='m')\n\
                  async def main():\n\
                  \x20   print((await Runner.run(a, 'x')).final_output, end=' ')\n\
                  \x20   r = Runner.run_streamed(a, 'x')\n\
                  \x20   async for _ in r.stream_events(): pass\n\
                  \x20   print(r.final_output)\n\
                  asyncio.run(main())";
    let command = ["python3", "-c", script];
    run_client("OpenAI Agents SDK for Python", &OPENAI, &command).await;
}

/// `fetch` of Node 20 ignores the variables of a proxy, so the program sets the agent of `undici`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Node 20, openai, @anthropic-ai/sdk and undici"]
async fn node_20() {
    let node = clients().map_or("node".into(), |clients| clients.join("node20/bin/node"));
    let begin = "if (!process.version.startsWith('v20.')) throw process.version;\n\
                 const u = require('undici');\nconst dispatcher = new u.EnvHttpProxyAgent();\n\
                 const fetchOptions = { dispatcher }, fetch = u.fetch;\n";
    let openai = "const { OpenAI } = require('openai');\nconst c = new OpenAI({ fetch, fetchOptions });\n\
                  const m = { model: 'm', messages: [{ role: 'user', content: 'x' }] };\n(async () => {\n\
                  const whole = (await c.chat.completions.create(m)).choices[0].message.content;\nlet text = '';\n\
                  for await (const p of await c.chat.completions.create({ ...m, stream: true }))\n\
                  text += p.choices[0].delta.content ?? '';\nconsole.log(whole, text);\n})();";
    let anthropic = "const { Anthropic } = require('@anthropic-ai/sdk');\nconst c = new Anthropic({ fetch, fetchOptions });\n\
                     const m = { model: 'm', max_tokens: 9, messages: [{ role: 'user', content: 'x' }] };\n(async () => {\n\
                     const whole = (await c.messages.create(m)).content[0].text;\n\
                     console.log(whole, await c.messages.stream(m).finalText());\n})();";
    for (name, vendor, script) in [("OpenAI", &OPENAI, openai), ("Anthropic", &ANTHROPIC, anthropic)] {
        let client = format!("{name} SDK for Node, Node 20 with `EnvHttpProxyAgent`");
        run_client(&client, vendor, &[node.to_str().unwrap(), "-e", &format!("{begin}{script}")]).await;
    }
}

/// The key of a remote server is that of any other API.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 with mcp"]
async fn mcp_over_http() {
    let vendor = Vendor { host: "mcp.test", key: "MCP_TOKEN", url: "MCP_URL", path: "/mcp" };
    let script = "import anyio, httpx2, os\nfrom mcp import Client\n\
                  from mcp.client.streamable_http import streamable_http_client\n\
                  async def main():\n\
                  \x20   http = httpx2.AsyncClient(headers={'Authorization': 'Bearer ' + os.environ['MCP_TOKEN']})\n\
                  \x20   async with Client(streamable_http_client(os.environ['MCP_URL'], http_client=http)) as c:\n\
                  \x20       tools = [t.name for t in (await c.list_tools()).tools]\n\
                  \x20       print(*[(await c.call_tool(t, {})).content[0].text for t in tools])\n\
                  anyio.run(main)";
    run_client("MCP SDK for Python, over HTTP", &vendor, &["python3", "-c", script]).await;
}
