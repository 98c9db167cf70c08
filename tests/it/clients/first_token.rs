//! The time from a request to the first token of its stream, with the SDKs, directly and behind `exeat run`.

use std::process::Stdio;
use std::time::{Duration, Instant};

use super::agents::{AIDER_FLAGS, GEMINI_SETTINGS};
use super::model_apis::{ANTHROPIC, Api, GOOGLE, OPENAI, SLOW, Script, Vendor, behind_run, random_key};
use super::*;

/// The pause after the first token of the last request of each run, which ends with that token.
const PAUSE: Duration = Duration::from_secs(30);

/// Returns the time until the first text of a stream, in microseconds, and reads the stream to its end.
const PYTHON: &str = "import time\n\
    def once(prompt):\n\
    \x20   begin = time.perf_counter()\n\
    \x20   took = None\n\
    \x20   for text in stream(prompt):\n\
    \x20       if text and took is None: took = time.perf_counter() - begin\n\
    \x20       if text and prompt == SLOW: break\n\
    \x20   return round(took * 1e6)\n";

fn python(client: &str, stream: &str) -> Vec<String> {
    let script = format!(
        "SLOW = '{SLOW}'\n{client}\ndef stream(prompt):\n    {stream}\n{PYTHON}print(*[once('x') for _ in range(41)], once(SLOW), flush=True)\nimport os\nos._exit(0)"
    );
    ["python3", "-c", &script].map(str::to_owned).into()
}

fn node(client: &str, stream: &str) -> Vec<String> {
    let script = format!(
        "{client}\nasync function* stream(prompt) {{ {stream} }}\n\
         async function once(prompt) {{\n\
         const begin = performance.now();\nlet took;\n\
         for await (const text of stream(prompt)) {{\n\
         if (text && took === undefined) took = performance.now() - begin;\n\
         if (text && prompt === '{SLOW}') break;\n}}\n\
         return Math.round(took * 1e3);\n}}\n\
         (async () => {{\nconst all = [];\nfor (let i = 0; i < 41; i++) all.push(await once('x'));\n\
         console.log(...all, await once('{SLOW}'));\nprocess.exit();\n}})();"
    );
    ["node", "-e", &script].map(str::to_owned).into()
}

/// The figures are printed, and depend on the machine. A stream that were held until its end would exceed the limit.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs python3 and node with the SDKs"]
async fn first_tokens() {
    let rows: [(&str, &Vendor, Vec<String>); 6] = [
        (
            "Anthropic SDK for Python",
            &ANTHROPIC,
            python(
                "import anthropic\nc = anthropic.Anthropic()",
                "with c.messages.stream(model='m', max_tokens=9, messages=[{'role': 'user', 'content': prompt}]) as s: \
                 yield from s.text_stream",
            ),
        ),
        (
            "OpenAI SDK for Python",
            &OPENAI,
            python(
                "import openai\nc = openai.OpenAI()",
                "for p in c.chat.completions.create(stream=True, model='m', messages=[{'role': 'user', 'content': prompt}]): \
                 yield p.choices[0].delta.content",
            ),
        ),
        (
            "Google Gen AI SDK for Python",
            &GOOGLE,
            python(
                "from google import genai\nc = genai.Client()",
                "for p in c.models.generate_content_stream(model='m', contents=prompt): yield p.text",
            ),
        ),
        (
            "Anthropic SDK for Node",
            &ANTHROPIC,
            node(
                "const { Anthropic } = require('@anthropic-ai/sdk');\nconst c = new Anthropic();",
                "const asked = { model: 'm', max_tokens: 9, messages: [{ role: 'user', content: prompt }] };\n\
                 for await (const e of c.messages.stream(asked)) yield e.delta?.text;",
            ),
        ),
        (
            "OpenAI SDK for Node",
            &OPENAI,
            node(
                "const { OpenAI } = require('openai');\nconst c = new OpenAI();",
                "const asked = { model: 'm', stream: true, messages: [{ role: 'user', content: prompt }] };\n\
                 for await (const p of await c.chat.completions.create(asked)) yield p.choices[0].delta.content;",
            ),
        ),
        (
            "Google Gen AI SDK for Node",
            &GOOGLE,
            node(
                "const { GoogleGenAI } = require('@google/genai');\n\
                 const c = new GoogleGenAI({ apiKey: process.env.GEMINI_API_KEY });",
                "for await (const p of await c.models.generateContentStream({ model: 'm', contents: prompt })) yield p.text;",
            ),
        ),
    ];
    for (client, vendor, command) in rows {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let place = place().await;
        let key = random_key();
        let script = Script { pause: PAUSE, ..Script::default() };
        let (_, port) = Api::start(&place.builder, "localhost", &key, script.clone()).await;
        let direct = directly(&place, vendor, port, &key, &command).await;
        let (_, port) = Api::start(&place.builder, vendor.host, &key, script).await;
        let behind = behind_run(&place, vendor, port, &key, &[], &command).await;
        let [direct, behind] = [direct, behind].map(|output| times(&output));
        println!(
            "{client}: first request {} and {} ms, median of the next 40 {} and {} ms",
            direct.0, behind.0, direct.1, behind.1
        );
    }
}

/// The time from the start of a program to its end, with an answer of one token. `EXEAT_TEST_RUNS` is the number of runs.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs claude, codex, gemini, aider and llm"]
async fn first_tokens_of_programs() {
    let runs = std::env::var("EXEAT_TEST_RUNS").map_or(1, |runs| runs.parse().unwrap());
    let aider = clients().map_or("aider".into(), |clients| clients.join("aider/bin/aider"));
    let aider = format!("OPENAI_API_BASE=$OPENAI_BASE_URL {} --model openai/m {AIDER_FLAGS}", aider.display());
    let gemini = format!("{GEMINI_SETTINGS}; gemini --skip-trust -m gemini-2.5-flash -p x");
    let codex = "codex exec --skip-git-repo-check -c openai_base_url=\"$OPENAI_BASE_URL\" x";
    let rows: [(&str, Vendor, &str); 5] = [
        ("Claude Code, `claude -p`", ANTHROPIC, "claude -p x"),
        ("Codex CLI, `codex exec`", Vendor { key: "CODEX_API_KEY", ..OPENAI }, codex),
        ("Gemini CLI, `gemini -p`", GOOGLE, &gemini),
        ("aider", OPENAI, &aider),
        ("llm", OPENAI, "llm -m gpt-4o-mini x"),
    ];
    for (client, vendor, script) in rows {
        let mut took = [Vec::new(), Vec::new()];
        for _ in 0..runs {
            for (way, took) in took.iter_mut().enumerate() {
                let place = place().await;
                let key = random_key();
                let host = if way == 0 { "localhost" } else { vendor.host };
                let (_, port) = Api::start(&place.builder, host, &key, Script::default()).await;
                let begin = Instant::now();
                let output = match way {
                    0 => directly(&place, &vendor, port, &key, &["sh", "-c", script]).await,
                    _ => behind_run(&place, &vendor, port, &key, &[], &["sh", "-c", script]).await,
                };
                took.push(begin.elapsed());
                assert!(assert_ok(&output).contains("hello"), "{client} {}", text(&output.stderr));
            }
        }
        let [direct, behind] = took.map(|mut took| {
            took.sort_unstable();
            took[runs / 2]
        });
        println!("{client}: median of {runs} {:.2} and {:.2} s", direct.as_secs_f64(), behind.as_secs_f64());
    }
}

/// Runs a client without a proxy, with a scripted API on `localhost`.
async fn directly(place: &Place, vendor: &Vendor, port: u16, key: &str, command: &[&str]) -> Output {
    let mut direct = Command::new("env");
    direct.arg(format!("{}=https://localhost:{port}{}", vendor.url, vendor.path)).args(command);
    let roots = place.dir().join("origin-ca.pem");
    direct.current_dir(place.dir()).env("SSL_CERT_FILE", &roots).env("NODE_EXTRA_CA_CERTS", &roots);
    direct.env(vendor.key, key).env("HOME", place.dir()).stdin(Stdio::null());
    with_clients(&mut direct);
    output(direct).await
}

/// Returns the times of the first request and, as a median, of the others, in ms.
#[track_caller]
fn times(output: &Output) -> (f64, f64) {
    let times: Vec<u32> = assert_ok(output).split_whitespace().map(|time| time.parse().unwrap()).collect();
    let (held, times) = times.split_last().unwrap();
    assert!(Duration::from_micros((*held).into()) < PAUSE / 2, "{held} us");
    let (first, rest) = times.split_first().unwrap();
    let mut rest = rest.to_vec();
    rest.sort_unstable();
    (f64::from(*first) / 1e3, f64::from(rest[rest.len() / 2]) / 1e3)
}
