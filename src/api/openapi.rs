//! The OpenAPI description of the admin API. `docs/openapi.yaml` is its source, and `GET /openapi.json` serves it.

use std::sync::LazyLock;

use serde_json::Value;

static DESCRIPTION: LazyLock<Value> =
    LazyLock::new(|| serde_saphyr::from_str(include_str!("../../docs/openapi.yaml")).unwrap_or_default());

/// Returns the description.
pub(super) fn description() -> &'static Value {
    &DESCRIPTION
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::api::admin::PATHS;

    /// Returns the values of all members of this name, at any depth.
    fn members<'a>(name: &str, value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get(name).and_then(Value::as_str));
                map.values().for_each(|value| members(name, value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| members(name, value, found)),
            _ => {}
        }
    }

    #[test]
    fn describes_the_paths_and_methods_that_are_answered() {
        let described = description()["paths"].as_object().unwrap().iter().map(|(path, item)| {
            let methods = ["get", "post", "put", "delete"].into_iter().filter(|method| item.get(method).is_some());
            let methods: Vec<_> =
                methods.map(|m| if m == "get" { "GET, HEAD".to_owned() } else { m.to_uppercase() }).collect();
            (path.clone(), methods.join(", "))
        });
        let answered = PATHS.iter().map(|(path, methods)| ((*path).to_owned(), (*methods).to_owned()));
        assert_eq!(described.collect::<BTreeMap<_, _>>(), answered.collect::<BTreeMap<_, _>>());
    }

    #[test]
    fn every_reference_has_a_target_and_every_operation_a_name_of_its_own() {
        let mut references = Vec::new();
        members("$ref", description(), &mut references);
        assert!(references.len() > 50);
        for reference in references {
            let target = reference.strip_prefix('#').and_then(|pointer| description().pointer(pointer));
            assert!(target.is_some(), "{reference}");
        }
        let mut names = Vec::new();
        members("operationId", &description()["paths"], &mut names);
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
