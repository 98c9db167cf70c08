//! The OpenAPI description of the admin API, with which every answer in the tests is compared.

use std::sync::LazyLock;

use serde_json::{Value, json};

use super::Reply;

/// `docs/openapi.yaml`.
pub static DESCRIPTION: LazyLock<Value> =
    LazyLock::new(|| serde_saphyr::from_str(include_str!("../../../docs/openapi.yaml")).unwrap());

impl Reply {
    /// Asserts that the description has this answer of the admin listener: its status, media type, required fields and
    /// body. Answers to a path or method that it does not have, and to a head that is too large, are excepted.
    pub fn assert_described(&self, method: &str, path: &str) {
        let lower = method.to_ascii_lowercase();
        let at = path.split_once('?').map_or(path, |(path, _)| path);
        let is_at = |known: &str| {
            let same = |(known, segment): (&str, &str)| known.starts_with('{') || known == segment;
            known.split('/').count() == at.split('/').count() && known.split('/').zip(at.split('/')).all(same)
        };
        let known = DESCRIPTION["paths"].as_object().unwrap().keys().find(|known| is_at(known));
        let operation = known.and_then(|known| {
            let verb = if method == "HEAD" { "get" } else { &*lower };
            let pointer = format!("/paths/{}/{verb}", known.replace('/', "~1"));
            DESCRIPTION.pointer(&pointer).filter(|_| method.bytes().all(|byte| byte.is_ascii_uppercase()))
        });
        let Some(operation) = operation else {
            let expected: &[u16] = if known.is_some() { &[401, 403, 405] } else { &[401, 403, 404] };
            assert!(expected.contains(&self.status.as_u16()), "{method} {path}: {self:?}");
            return;
        };
        if self.status == 431 {
            return;
        }
        let (what, status) = (format!("{method} {path}: {self:?}"), self.status.as_str());
        let described = resolved(operation["responses"].get(status).unwrap_or_else(|| panic!("{what}")));
        for (name, field) in described["headers"].as_object().into_iter().flatten() {
            assert!(field["required"] != true || self.headers.contains_key(name), "{name}: {what}");
        }
        let kind = self.header("content-type").and_then(|kind| kind.split(';').next()).unwrap_or_default();
        let content = described["content"].get(kind).unwrap_or_else(|| panic!("{kind}: {what}"));
        if method == "HEAD" {
            return;
        }
        let body = if kind == "application/json" { self.problem() } else { self.text().into() };
        let mut schema = content["schema"].clone();
        schema["components"] = DESCRIPTION["components"].clone();
        let validator = jsonschema::draft202012::options().should_validate_formats(true).build(&schema).unwrap();
        let problems: Vec<_> = validator.iter_errors(&body).map(|error| error.to_string()).collect();
        assert_eq!(json!(problems), json!([]), "{what}");
    }
}

fn resolved(value: &Value) -> &Value {
    let target = value["$ref"].as_str().and_then(|target| target.strip_prefix('#'));
    target.map_or(value, |pointer| DESCRIPTION.pointer(pointer).unwrap())
}
