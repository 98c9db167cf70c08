//! Parses JSON in which no object has a member twice. Readers differ in which of them they take (RFC 8259 §4), so a person could be shown
//! another call than the one that runs.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// Parses a text.
///
/// # Errors
/// If it is not JSON, or an object in it has a member twice.
pub(super) fn from_str(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text).map(|Unique(value)| value)
}

struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Unique(value)) = all.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let mut members = Map::new();
        while let Some(name) = all.next_key::<String>()? {
            let Unique(value) = all.next_value()?;
            if members.insert(name, value).is_some() {
                return Err(A::Error::custom("a member is there twice"));
            }
        }
        Ok(members.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_there_once() {
        let whole = r#"{"a":[1,-2,0.5,1e300,true,null,"\u0041",{"a":{}}],"b":"c","":18446744073709551615}"#;
        assert_eq!(from_str(whole).unwrap(), serde_json::from_str::<Value>(whole).unwrap());
        for text in [r#"{"a":1,"a":1}"#, r#"{"a":1,"\u0061":2}"#, r#"[{"b":{"c":1,"c":2}}]"#, "{", "{}x", ""] {
            assert!(from_str(text).is_err(), "{text}");
        }
        let deep = "[".repeat(10_000);
        assert!(from_str(&deep).is_err());
    }
}
