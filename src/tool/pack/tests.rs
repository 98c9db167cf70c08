//! Tests of packs: valid ones, problems, and the results of their tools.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const OPEN: &str = "version: {sandbox: {network_access: true}}\n";

fn read(yaml: &str) -> Pack {
    Pack::read(yaml).unwrap_or_else(|problems| panic!("{problems:#?}\n{yaml}"))
}

fn problems(yaml: &str) -> Vec<String> {
    Pack::read(yaml).map(|_| Vec::new()).unwrap_or_else(|found| found.iter().map(Problem::to_string).collect())
}

/// Returns a pack with tools as flow mappings.
fn pack(tools: &[String]) -> String {
    let items: String = tools.iter().map(|tool| format!("    - {tool}\n")).collect();
    format!("{OPEN}tools:\n  custom:\n{items}")
}

fn tool(name: &str, implementation: &str) -> String {
    let properties =
        "{sku: {type: string}, order: {type: object, properties: {id: {}}}, opt: {}, headers: {type: object}}";
    let parameters = format!("{{type: object, properties: {properties}}}");
    format!("{{name: {name}, description: d, parameters: {parameters}, implementation: {implementation}}}")
}

fn http(args: &str) -> String {
    tool("t", &format!("{{primitive: http_request, args: {args}}}"))
}

fn run(tool: &str, arguments: &Value) -> Result<Step, String> {
    let pack = read(&pack(&[tool.to_owned()]));
    let Lookup::Offered(composed) = pack.find("t") else { panic!("{tool} is not offered") };
    composed.run(arguments)
}

fn request(tool: &str, arguments: &Value) -> Rendered {
    match run(tool, arguments) {
        Ok(Step::Request(rendered)) => rendered,
        other => panic!("{tool}: {other:?}"),
    }
}

#[test]
fn reports_problems_with_a_version() {
    let kinds = "browser, build, data, file, network, terminal";
    let unknown = |kind: &str| format!("unknown kind \"{kind}\"; choose from {kinds}");
    let rows = [
        ("version: 3", "version: must be a mapping, not a number".to_owned()),
        (
            "version: {execution_mode: fast}",
            "version.execution_mode: unknown mode \"fast\"; choose one of native, prompt_eval, responses, multi_turn"
                .to_owned(),
        ),
        ("version: {execution_mode: [native]}", "version.execution_mode: must be text, not a list".to_owned()),
        (
            "version: {execution_mode: prompt_eval, tool_policy: {allow_shell: false}}",
            "version.tool_policy: must be left out with execution_mode prompt_eval".to_owned(),
        ),
        (
            "version: {execution_mode: prompt_eval, tool_policy: }",
            "version.tool_policy: must be left out with execution_mode prompt_eval".to_owned(),
        ),
        ("sandbox: {network_access: false}", "sandbox: belongs under version".to_owned()),
        ("execution_mode: prompt_eval", "execution_mode: belongs under version".to_owned()),
        ("version: {tool_policy: []}", "version.tool_policy: must be a mapping, not a list".to_owned()),
        (
            "version: {tool_policy: {allow_shel: true}}",
            "version.tool_policy.allow_shel: unknown key; known: allowed_tool_kinds, allow_shell, allow_network, allow_sql_writes"
                .to_owned(),
        ),
        (
            "version: {tool_policy: {allow_shell: yes}}",
            "version.tool_policy.allow_shell: must be true or false, not text".to_owned(),
        ),
        (
            "version: {tool_policy: {allow_network: 1}}",
            "version.tool_policy.allow_network: must be true or false, not a number".to_owned(),
        ),
        (
            "version: {tool_policy: {allowed_tool_kinds: file}}",
            "version.tool_policy.allowed_tool_kinds: must be a list, not text".to_owned(),
        ),
        (
            "version: {tool_policy: {allowed_tool_kinds: [file, 5]}}",
            "version.tool_policy.allowed_tool_kinds[1]: must be text, not a number".to_owned(),
        ),
        (
            "version: {tool_policy: {allowed_tool_kinds: [file, net]}}",
            format!("version.tool_policy.allowed_tool_kinds[1]: {}", unknown("net")),
        ),
        (
            "version: {tool_policy: {allowed_tool_kinds: [shell]}}",
            "version.tool_policy.allowed_tool_kinds[0]: shell is not a kind; use allow_shell: true".to_owned(),
        ),
        (
            "version: {sandbox: {network_access: 'true'}}",
            "version.sandbox.network_access: must be true or false, not text".to_owned(),
        ),
        (
            "version: {sandbox: {network_acess: true}}",
            "version.sandbox.network_acess: unknown key; is network_access meant?".to_owned(),
        ),
        (
            "version: {sandbox: {network_allowlist: [10.0.0.0]}}",
            "version.sandbox.network_allowlist[0]: \"10.0.0.0\" is not a CIDR, such as 203.0.113.0/24".to_owned(),
        ),
        (
            "version: {sandbox: {network_allowlist: [203.0.113.7/24]}}",
            "version.sandbox.network_allowlist[0]: host bits are set; write 203.0.113.0/24".to_owned(),
        ),
        (
            "version: {sandbox: {env_vars: [A]}}",
            "version.sandbox.env_vars: must be a mapping, not a list".to_owned(),
        ),
        (
            "version: {sandbox: {env_vars: {A: 1}}}",
            "version.sandbox.env_vars.A: must be text, not a number".to_owned(),
        ),
        (
            "version: {sandbox: {env_vars: {A: '${secrets.K}'}}}",
            "version.sandbox.env_vars.A: must be literal, without ${…}; a secret belongs in the headers of an http_request, as ${secrets.NAME}".to_owned(),
        ),
        (
            "version: {sandbox: {env_vars: {A: 'workspace-secret://K'}}}",
            "version.sandbox.env_vars.A: workspace-secret:// belongs in the credential sources of the proxy's configuration; a pack says ${secrets.NAME}".to_owned(),
        ),
        ("version: {tool_polcy: {}}", "version.tool_polcy: unknown key; is tool_policy meant?".to_owned()),
        ("tool_policy: {}", "tool_policy: belongs under version".to_owned()),
        ("tool: {}", "tool: unknown key; is tools meant?".to_owned()),
        ("tools: []", "tools: must be a mapping, not a list".to_owned()),
        ("tools: {custom: {}}", "tools.custom: must be a list, not a mapping".to_owned()),
        ("tools: {custm: []}", "tools.custm: unknown key; known: custom".to_owned()),
        ("tools: {custom: [5]}", "tools.custom[0]: must be a mapping, not a number".to_owned()),
        ("version: {tools: {custom: [5]}}", "version.tools.custom[0]: must be a mapping, not a number".to_owned()),
        (
            "tools: {custom: []}\nversion: {tools: {custom: []}}",
            "version.tools: tools are at the top already; keep one of the two".to_owned(),
        ),
        ("[]", "pack: must be a mapping, not a list".to_owned()),
        ("", "pack: must be a mapping, not nothing".to_owned()),
    ];
    for (yaml, want) in rows {
        assert_eq!(problems(yaml), [want], "{yaml}");
    }
}

#[test]
fn reports_problems_with_a_tool() {
    let d = "description: d, implementation: {type: mock, strategy: echo}";
    let rows = [
        (format!("{{{d}}}"), ".name: missing"),
        (format!("{{name: 5, {d}}}"), ".name: must be text, not a number"),
        (format!("{{name: '', {d}}}"), ".name: \"\" is not a valid name: use 1 to 64 letters, digits, _ and -"),
        (format!("{{name: a b, {d}}}"), ".name: \"a b\" is not a valid name: use 1 to 64 letters, digits, _ and -"),
        (format!("{{name: read_file, {d}}}"), ".name: read_file is the name of a primitive"),
        (format!("{{name: http_request, {d}}}"), ".name: http_request is the name of a primitive"),
        (format!("{{name: api_call, {d}}}"), ".name: api_call is the name of a built-in tool"),
        (format!("{{name: webhook, {d}}}"), ".name: webhook is the name of a built-in tool"),
        (
            format!("{{name: t, strict: true, {d}}}"),
            ".strict: unknown key; known: name, description, parameters, implementation",
        ),
        (
            "{name: t, description: ' ', implementation: {type: mock, strategy: echo}}".into(),
            ".description: empty; models need it to decide when to call the tool",
        ),
        (
            "{name: t, description: 'x ${secrets.K}', implementation: {type: mock, strategy: echo}}".into(),
            ".description: a description resolves no secret",
        ),
        ("{name: t, description: d}".into(), ".implementation: missing"),
        ("{name: t, description: d, implementation: x}".into(), ".implementation: must be a mapping, not text"),
        (format!("{{name: t, parameters: 5, {d}}}"), ".parameters: must be a JSON Schema of type object"),
        (format!("{{name: t, parameters: {{}}, {d}}}"), ".parameters.type: must be object"),
        (format!("{{name: t, parameters: {{type: string}}, {d}}}"), ".parameters.type: must be object"),
        (
            format!("{{name: t, parameters: {{type: object, required: a}}, {d}}}"),
            ".parameters: no valid JSON Schema at /required: value is not of type \"array\"",
        ),
        (
            tool("t", "{type: script}"),
            ".implementation.type: unknown type \"script\"; mock, or left out for a primitive",
        ),
        (tool("t", "{args: {}}"), ".implementation.primitive: missing"),
        (tool("t", "{primitive: [a], args: {}}"), ".implementation.primitive: must be text, not a list"),
        (tool("t", "{primitive: t, args: {}}"), ".implementation.primitive: names the tool itself"),
        (
            tool("t", "{primitive: fetch, args: {}}"),
            ".implementation.primitive: \"fetch\" is neither a tool of this pack nor a primitive: submit, read_file, write_file, list_files, search_files, search_text, query_json, query_sql, http_request, run_tests, build, exec",
        ),
        (tool("t", "{primitive: http_request}"), ".implementation.args: missing"),
        (tool("t", "{primitive: http_request, args: }"), ".implementation.args: missing"),
        (tool("t", "{primitive: read_file, args: x}"), ".implementation.args: must be a mapping, not text"),
        (
            tool("t", "{primitive: submit, args: {answer: x}, retries: 3}"),
            ".implementation.retries: unknown key; known: type, primitive, args",
        ),
        (
            tool("t", "{primitive: read_file, args: {}}"),
            ".implementation.args: read_file requires \"path\", which is missing",
        ),
        (
            tool("t", "{primitive: read_file, args: {path: a, lines: 3}}"),
            ".implementation.args.lines: unknown key; known: limit, offset, path",
        ),
        (
            tool("t", "{primitive: list_files, args: {depth: 99}}"),
            ".implementation.args.depth: list_files does not take this value",
        ),
        (
            tool("t", "{primitive: read_file, args: {path: ['${missing}']}}"),
            ".implementation.args.path[0]: unknown placeholder ${missing}: parameters have no \"missing\"",
        ),
        (
            tool("t", "{primitive: read_file, args: {path: '${order.none}'}}"),
            ".implementation.args.path: unknown placeholder ${order.none}: order has no \"none\"",
        ),
        (
            tool("t", "{primitive: read_file, args: {path: '${sku'}}"),
            ".implementation.args.path: a ${ that no } closes; $${ is the text ${",
        ),
        (
            tool("t", "{primitive: submit, args: {answer: {'${sku}': x}}}"),
            ".implementation.args.answer[\"${sku}\"]: placeholders are not allowed in keys",
        ),
        (
            tool("t", "{primitive: exec, args: {command: ['${secrets.K}']}}"),
            ".implementation.args.command[0]: ${secrets.K} reaches only a tool whose implementation.primitive is http_request",
        ),
        (
            tool("t", "{primitive: exec, args: {command: ['workspace-secret://K']}}"),
            ".implementation.args.command[0]: workspace-secret:// belongs in the credential sources of the proxy's configuration; a pack says ${secrets.NAME}",
        ),
    ];
    for (tool, want) in rows {
        assert_eq!(problems(&pack(std::slice::from_ref(&tool))), [format!("tools.custom[0]{want}")], "{tool}");
    }
    let twice = [tool("t", "{type: mock, strategy: echo}"), tool("t", "{type: mock, strategy: echo}")];
    assert_eq!(problems(&pack(&twice)), ["tools.custom[1].name: t is the name of tools.custom[0] already"]);
}

#[test]
fn reports_problems_with_the_arguments_of_http_request() {
    let url = "url: https://h.example/";
    let no_secret = "is in a place where the proxy swaps none; put it into headers, the body or the URL";
    let set = |name: &str| format!(".headers.{name}: {} is set by exeat; leave it out", name.to_lowercase());
    let rows = [
        ("{}".to_owned(), ".url: missing".to_owned()),
        ("{url: 5}".to_owned(), ".url: must be text, not a number".to_owned()),
        ("{url: 'https://h.example/${none}'}".into(), ".url: unknown placeholder ${none}: parameters have no \"none\"".into()),
        ("{url: 'https://h.example/?${secrets.K}'}".into(), ".url: ${secrets.K} is in a place where the proxy swaps none; in a URL it may be a part of the path, or the value of a query parameter".into()),
        ("{url: 'http://h.example/?k=${secrets.K}'}".into(), ".url: a secret leaves over https only".into()),
        (format!("{{{url}, cookies: x}}"), ".cookies: unknown key; known: method, url, headers, body, timeout".into()),
        (format!("{{{url}, method: 'GET /'}}"), ".method: must be a method such as GET".into()),
        (format!("{{{url}, method: 5}}"), ".method: must be a method such as GET".into()),
        (format!("{{{url}, method: connect}}"), ".method: CONNECT opens a tunnel and is not supported".into()),
        (format!("{{{url}, method: [GET]}}"), ".method: must be text, not a list".into()),
        (format!("{{{url}, method: '${{secrets.K}}'}}"), format!(".method: ${{secrets.K}} {no_secret}")),
        (format!("{{{url}, timeout: 61}}"), ".timeout: must be a whole number of seconds from 1 to 60".into()),
        (format!("{{{url}, timeout: 0}}"), ".timeout: must be a whole number of seconds from 1 to 60".into()),
        (format!("{{{url}, timeout: '30'}}"), ".timeout: must be a whole number of seconds from 1 to 60".into()),
        (format!("{{{url}, timeout: '1${{opt}}'}}"), ".timeout: must be a whole number of seconds from 1 to 60".into()),
        (format!("{{{url}, body: {{'${{secrets.K}}': 1}}}}"), ".body[\"${secrets.K}\"]: placeholders are not allowed in keys".into()),
        (format!("{{{url}, headers: [a]}}"), ".headers: must be a mapping, or one placeholder for all of them".into()),
        (format!("{{{url}, headers: 'a${{headers}}'}}"), ".headers: must be a mapping, or one placeholder for all of them".into()),
        (format!("{{{url}, headers: {{'a b': x}}}}"), ".headers[\"a b\"]: \"a b\" is not a valid header name".into()),
        (format!("{{{url}, headers: {{'X-${{sku}}': x}}}}"), ".headers[\"X-${sku}\"]: placeholders are not allowed in keys".into()),
        (format!("{{{url}, headers: {{X-A: x, x-a: y}}}}"), ".headers.x-a: x-a is written twice".into()),
        (format!("{{{url}, headers: {{X-A: [x]}}}}"), ".headers.X-A: must be text, not a list".into()),
        (format!("{{{url}, headers: {{X-A: }}}}"), ".headers.X-A: must be text, not nothing".into()),
        (format!("{{{url}, headers: {{X-A: \"x\\ny\"}}}}"), ".headers.X-A: control characters, such as line ends, are not allowed in headers".into()),
        (format!("{{{url}, headers: {{X-A: \"x\\ty\"}}}}"), ".headers.X-A: control characters, such as line ends, are not allowed in headers".into()),
        (format!("{{{url}, headers: {{X-A: \"x\\t${{sku}}\"}}}}"), ".headers.X-A: control characters, such as line ends, are not allowed in headers".into()),
        (format!("{{{url}, headers: {{Host: x}}}}"), set("Host")),
        (format!("{{{url}, headers: {{Accept-Encoding: x}}}}"), set("Accept-Encoding")),
        (format!("{{{url}, headers: {{Expect: x}}}}"), set("Expect")),
        (format!("{{{url}, headers: {{content-length: x}}}}"), set("content-length")),
        (format!("{{{url}, headers: {{Transfer-Encoding: x}}}}"), set("Transfer-Encoding")),
        (format!("{{{url}, headers: {{Proxy-Authorization: x}}}}"), set("Proxy-Authorization")),
        (format!("{{{url}, headers: {{Exeat-Swap: x}}}}"), set("Exeat-Swap")),
        (format!("{{{url}, body: ['${{secrets.A}}', '${{secrets.B}}', '${{secrets.C}}', '${{secrets.D}}', '${{secrets.E}}', '${{secrets.F}}']}}"), ": a request may use 5 secrets, and this one names A, B, C, D, E, F".into()),
    ];
    for (args, want) in rows {
        let want = format!("tools.custom[0].implementation.args{want}");
        assert_eq!(problems(&pack(&[http(&args)])), [want], "{args}");
    }
}

#[test]
fn reports_problems_with_a_mock() {
    let rows = [
        ("strategy: random", ".strategy: unknown strategy \"random\"; choose one of static, lookup, echo"),
        ("strategy: static", ".response: missing"),
        ("lookup_key: sku", ".responses: missing"),
        ("responses: {}", ".lookup_key: missing"),
        ("default: 1, lookup_key: sku", ".responses: missing"),
        ("default: 1, responses: {}", ".lookup_key: missing"),
        (
            "response: 1, lookup_key: sku, responses: {}",
            ".response: unknown key; known: type, strategy, primitive, args, lookup_key, responses, default",
        ),
        ("strtegy: static", ".strtegy: unknown key; known: type, strategy, primitive, args"),
        ("strategy: echo, response: 1", ".response: unknown key; known: type, strategy, primitive, args"),
        ("strategy: lookup, responses: {}", ".lookup_key: missing"),
        ("strategy: lookup, lookup_key: sku", ".responses: missing"),
        ("strategy: lookup, lookup_key: sku, responses: []", ".responses: must be a mapping, not a list"),
        (
            "strategy: lookup, lookup_key: none, responses: {}",
            ".lookup_key: unknown placeholder ${none}: parameters have no \"none\"",
        ),
        (
            "strategy: lookup, lookup_key: '${sku}', responses: {}",
            ".lookup_key: \"${sku}\" is not a valid parameter name, such as sku or order.id",
        ),
        ("strategy: static, response: {a: ['${secrets.K}']}", ".response.a[0]: a mock resolves no secret"),
        (
            "strategy: static, response: 'workspace-secret://K'",
            ".response: workspace-secret:// belongs in the credential sources of the proxy's configuration; a pack says ${secrets.NAME}",
        ),
    ];
    for (keys, want) in rows {
        let mock = tool("t", &format!("{{type: mock, {keys}}}"));
        assert_eq!(problems(&pack(&[mock])), [format!("tools.custom[0].implementation{want}")], "{keys}");
    }
}

#[test]
fn refuses_cycles_and_long_chains() {
    let delegate = |name: &str, to: &str| tool(name, &format!("{{primitive: {to}, args: {{}}}}"));
    let circle = [delegate("x", "a"), delegate("a", "b"), delegate("b", "c"), delegate("c", "a")];
    assert_eq!(
        problems(&pack(&circle)),
        ["tools.custom[1].implementation.primitive: delegates in a circle: a -> b -> c -> a"]
    );
    let chain = |jumps: usize| {
        let mut tools: Vec<String> = (1..jumps).map(|n| delegate(&format!("t{n}"), &format!("t{}", n + 1))).collect();
        tools.push(tool(&format!("t{jumps}"), "{primitive: read_file, args: {path: a}}"));
        pack(&tools)
    };
    read(&chain(8));
    assert_eq!(
        problems(&chain(9)),
        [
            "tools.custom[0].implementation.primitive: delegates 9 times, and 8 is the most: t1 -> t2 -> t3 -> t4 -> t5 -> t6 -> t7 -> t8 -> t9 -> read_file"
        ]
    );
    let mocked = [delegate("a", "b"), tool("b", "{type: mock, strategy: echo, primitive: a}")];
    read(&pack(&mocked));
}

#[test]
fn a_delegation_passes_the_required_arguments() {
    let next = "{name: next, description: d, parameters: {type: object, properties: {id: {}, opt: {}}, required: [id]}, \
                implementation: {primitive: http_request, args: {url: 'https://h.example/${id}'}}}";
    let over = |args: &str| pack(&[next.to_owned(), tool("t", &format!("{{primitive: next, args: {args}}}"))]);
    let missing = "tools.custom[1].implementation.args: next requires \"id\", which is missing";
    for args in ["{}", "{opt: 1}", "{Id: 1}"] {
        assert_eq!(problems(&over(args)), [missing], "{args}");
    }
    for args in ["{id: 1}", "{id: '${sku}'}", "{id: }"] {
        assert!(problems(&over(args)).is_empty(), "{args}");
    }
}

#[test]
fn reports_all_problems_in_document_order() {
    let yaml =
        "tools:\n  custom:\n    - {name: a b, implementation: {args: [], type: x}}\nversion: {execution_mode: x}";
    let paths: Vec<String> = Pack::read(yaml).unwrap_err().into_iter().map(|problem| problem.path).collect();
    let tool = "tools.custom[0]";
    assert_eq!(paths, [format!("{tool}.name"), format!("{tool}.implementation.type"), "version.execution_mode".into()]);
}

#[test]
fn other_sections_of_a_challenge_pack_are_ignored() {
    let yaml = "name: x\ncases: [1]\nversion: {number: 1, evaluation: {}, sandbox: {template: t, timeout: 5}}";
    assert_eq!(read(yaml).tools().count(), 0);
}

fn names(pack: &Pack) -> Vec<&str> {
    pack.tools().map(|(tool, _)| tool.name()).collect()
}

#[test]
fn the_gate_table_is_complete_and_only_open_tools_are_offered() {
    let tools = |tools: &[String], policy: &str| {
        let items: String = tools.iter().map(|tool| format!("    - {tool}\n")).collect();
        format!("version: {policy}\ntools:\n  custom:\n{items}")
    };
    let all = [
        tool("net", "{primitive: http_request, args: {url: 'https://h.example/'}}"),
        tool("via", "{primitive: net, args: {}}"),
        tool("file", "{primitive: read_file, args: {path: a.txt}}"),
        tool("mock", "{type: mock, strategy: echo, primitive: exec}"),
        tool("over_mock", "{primitive: mock, args: {}}"),
    ];
    let open = read(&tools(&all, "{sandbox: {network_access: true}}"));
    assert_eq!(names(&open), ["net", "via", "file", "mock", "over_mock"]);
    assert!(open.offers_http_request() && matches!(open.find("http_request"), Lookup::HttpRequest));
    assert!(
        matches!(open.find("file"), Lookup::Offered(_))
            && matches!(open.find("read_file"), Lookup::Primitive("read_file"))
    );
    assert!(matches!(open.find("none"), Lookup::Unknown) && matches!(open.find("exec"), Lookup::Withheld(_)));

    let shut = read(&tools(&all, "{tool_policy: {allowed_tool_kinds: [build]}}"));
    assert_eq!(names(&shut), ["mock", "over_mock"]);
    assert!(!shut.offers_http_request());
    let Lookup::Withheld(why) = shut.find("via") else { panic!() };
    assert_eq!(why, "over http_request: version.sandbox.network_access is not true");
    let gates = shut.gates();
    assert_eq!(gates.len(), 12 + 5);
    let file = gates.iter().find(|gate| gate.name == "file").unwrap();
    let by = "over read_file: version.tool_policy.allowed_tool_kinds does not list file";
    assert_eq!(
        *file,
        Gate { name: "file".into(), composed: true, allowed: false, by: by.into(), needs: Some("a sandbox") }
    );
    let served: Vec<&str> = gates.iter().filter(|gate| gate.needs.is_none()).map(|gate| gate.name.as_str()).collect();
    assert_eq!(served, ["http_request", "net", "via", "mock", "over_mock"]);

    let quiet = read(&tools(&all, "{execution_mode: prompt_eval, sandbox: {network_access: true}}"));
    assert_eq!((quiet.tools().count(), quiet.offers_http_request()), (0, false));
}

#[test]
fn mocks_answer_without_the_network() {
    let lookup = "{type: mock, strategy: lookup, lookup_key: order.id, responses: {a: 1, 5: {x: '${sku}'}, 'true': y}";
    let rows = [
        (
            "{type: mock, strategy: static, response: {a: ['${sku}', null]}}".to_owned(),
            json!({"sku": "x"}),
            Ok(json!({"a": ["${sku}", null]})),
        ),
        ("{type: mock, strategy: static, response: null}".to_owned(), json!({}), Ok(Value::Null)),
        ("{type: mock, strategy: echo}".to_owned(), json!({"sku": "x"}), Ok(json!({"sku": "x"}))),
        ("{type: mock}".to_owned(), json!({"sku": "x"}), Ok(json!({"sku": "x"}))),
        ("{type: mock, primitive: exec, args: {}}".to_owned(), json!({"sku": "x"}), Ok(json!({"sku": "x"}))),
        ("{type: mock, response: [1]}".to_owned(), json!({"sku": "x"}), Ok(json!([1]))),
        ("{type: mock, response: null}".to_owned(), json!({}), Ok(Value::Null)),
        ("{type: mock, lookup_key: sku, responses: {x: 1}, default: 2}".to_owned(), json!({"sku": "x"}), Ok(json!(1))),
        ("{type: mock, strategy: echo}".to_owned(), Value::Null, Ok(json!({}))),
        (format!("{lookup}}}"), json!({"order": {"id": "a"}}), Ok(json!(1))),
        (format!("{lookup}}}"), json!({"order": {"id": 5}}), Ok(json!({"x": "${sku}"}))),
        (format!("{lookup}}}"), json!({"order": {"id": true}}), Ok(json!("y"))),
        (format!("{lookup}}}"), json!({"order": {"id": "SEEN"}}), Err("the mock has no response for this order.id")),
        (format!("{lookup}}}"), json!({}), Err("the mock has no response for this order.id")),
        (format!("{lookup}, default: none}}"), json!({"order": {"id": "z"}}), Ok(json!("none"))),
        (
            "{type: mock, strategy: echo}".to_owned(),
            json!({"sku": 5}),
            Err("arguments at /sku: value is not of type \"string\" (type)"),
        ),
    ];
    for (mock, arguments, want) in rows {
        let want = want.map(Step::Answer).map_err(str::to_owned);
        assert_eq!(run(&tool("t", &mock), &arguments), want, "{mock} with {arguments}");
    }
}

#[test]
fn a_request_is_filled_in_and_marked() {
    let args = "{method: POST, url: 'https://h.example/i/${sku}?v=${opt}', timeout: 5, headers: {Authorization: 'Bearer ${secrets.KEY}', X-Order: '${order.id}', X-Opt: '${opt}'}, body: {sku: '${sku}', all: '${parameters}', opt: '${opt}'}}";
    let rendered = request(&http(args), &json!({"sku": "${secrets.KEY}", "order": {"id": 7}}));
    let nonce = &rendered.nonce;
    assert!(nonce.len() == 32 && nonce.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)));
    let want = json!({
        "method": "POST",
        "url": "https://h.example/i/$%7Bsecrets.KEY%7D?v=",
        "timeout": 5,
        "headers": {"Authorization": format!("Bearer ${{{nonce}.KEY}}"), "X-Order": "7"},
        "body": {"sku": "${secrets.KEY}", "all": {"sku": "${secrets.KEY}", "order": {"id": 7}}},
    });
    assert_eq!(Value::Object(rendered.arguments), want);
    assert_eq!(rendered.own_fields, ["authorization", "x-order", "x-opt"]);
    assert_ne!(*nonce, request(&http(args), &json!({"sku": "x"})).nonce);
}

#[test]
fn substituted_values_are_not_template_text() {
    let tool = http("{url: 'https://h.example/', headers: '${headers}', method: '${opt}', timeout: '${order.id}'}");
    let given = json!({"Authorization": "Bearer x", "X-N": 5, "X-Null": null});
    let rendered = request(&tool, &json!({"headers": given}));
    assert_eq!(
        Value::Object(rendered.arguments),
        json!({"url": "https://h.example/", "headers": {"Authorization": "Bearer x", "X-N": "5"}})
    );
    assert!(rendered.own_fields.is_empty());
    let rows = [
        (json!({"headers": {"X": ["SEEN"]}}), "header \"X\" must be text"),
        (json!({"headers": {"X": "a\r\nSEEN: 1"}}), "header \"X\" has control characters"),
        (json!({"opt": "GET /SEEN"}), "method must be a method such as GET"),
        (json!({"opt": 5}), "method must be a method such as GET"),
        (json!({"order": {"id": 600}}), "timeout must be a whole number of seconds from 1 to 60"),
        (json!({"order": {"id": "5"}}), "timeout must be a whole number of seconds from 1 to 60"),
    ];
    for (arguments, want) in rows {
        assert_eq!(run(&tool, &arguments), Err(want.to_owned()), "{arguments}");
    }
}

#[test]
fn a_delegated_call_passes_the_inner_tools_schema_and_its_template() {
    let inner = http("{url: 'https://h.example/${sku}', headers: {Authorization: 'Bearer ${secrets.K}'}}");
    let inner = inner.replace("name: t,", "name: inner,");
    let outer = tool("t", "{primitive: inner, args: {sku: '${opt}'}}");
    let pack = read(&pack(&[outer, inner]));
    let Lookup::Offered(outer) = pack.find("t") else { panic!() };
    let Ok(Step::Request(rendered)) = outer.run(&json!({"opt": "a/b${sku}"})) else { panic!() };
    assert_eq!(rendered.arguments["url"], "https://h.example/a/b$%7Bsku%7D");
    assert_eq!(rendered.own_fields, ["authorization"]);
    let refused = outer.run(&json!({"opt": 5}));
    assert_eq!(refused, Err("inner: arguments at /sku: value is not of type \"string\" (type)".into()));
}

/// Every example of the page, and the example pack in config/.
#[test]
fn every_documented_pack_is_valid() {
    let page = include_str!("../../../docs/packs.md");
    let blocks: Vec<&str> = page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(blocks.len() > 3);
    for block in blocks {
        read(block);
    }
    let example = read(include_str!("../../../config/pack.example.yaml"));
    assert!(example.offers_http_request());
    assert_eq!(names(&example), ["check_inventory", "reserve", "shipping_rates"]);
}

#[test]
fn the_page_names_every_primitive_kind_and_limit() {
    let page = include_str!("../../../docs/packs.md");
    for (name, _) in PRIMITIVES {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
    for word in ["terminal", "prompt_eval", "network_allowlist", "lookup_key", "1 MiB", "4 MiB", "$${"] {
        assert!(page.contains(word), "{word}");
    }
}

#[test]
fn accepts_two_hundred_tools() {
    let tools: Vec<String> = (0..200)
        .map(|n| {
            let args = format!("{{url: 'https://h.example/{n}/${{sku}}', headers: {{A: '${{secrets.K}}'}}}}");
            tool(&format!("tool_{n}"), &format!("{{primitive: http_request, args: {args}}}"))
        })
        .collect();
    assert_eq!(read(&pack(&tools)).tools().count(), 200);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}|\\$\\{(secrets\\.K|sku)\\}|[/?#@:.\\\\\\[\\]%]{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("sku|order|opt|headers|id|[a-zA-Z\\r -]{0,4}", inner), 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn arguments_of_any_shape_are_accepted_or_refused_briefly(arguments in any_json()) {
        let args = "{method: '${opt}', url: 'https://h.example${opt}/${sku}?${order.id}&a=${sku}', headers: '${headers}', body: '${parameters}'}";
        let both = [http(args), tool("t", "{type: mock, strategy: lookup, lookup_key: order.id, responses: {}}")];
        for tool in both {
            match run(&tool, &arguments) {
                Err(why) => prop_assert!(why.chars().count() <= 1001),
                Ok(Step::Answer(_) | Step::Primitive { .. }) => {}
                Ok(Step::Request(rendered)) => {
                    let url = rendered.arguments["url"].as_str().unwrap().to_owned();
                    prop_assert!(url.strip_prefix("https://h.example").is_some_and(|rest| rest.starts_with(['/', '?', '#'])), "{}", url);
                    prop_assert!(!Value::Object(rendered.arguments).to_string().contains(&rendered.nonce));
                }
            }
        }
    }

    #[test]
    fn any_text_is_a_pack_or_a_problem(text in "(version|tools|custom|name|[-:{}\\[\\] \\n'&*<!|>$a]){0,40}|.{0,60}") {
        let _ = Pack::read(&text);
    }
}
