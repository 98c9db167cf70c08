//! Reads fields of items from 1Password Connect.

use http::header::AUTHORIZATION;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use super::{StoreRequest, StoreValue, bearer, parsed, path};
use crate::daemon::own_request::OwnRequests;
use crate::model::secret::Secret;
use crate::policy::aws::{AwsKey, FetchedAwsKey, FetchedKeyId};
use crate::policy::secret_store::{StoreItem, StoreRead};
use crate::stages::mint::MintError;

/// A vault or an item in a list.
#[derive(Deserialize)]
struct Named {
    id: String,
}

#[derive(Deserialize)]
struct Item {
    #[serde(default)]
    sections: Vec<Section>,
    #[serde(default)]
    fields: Vec<Field>,
}

#[derive(Deserialize)]
struct Section {
    id: String,
    label: Option<String>,
}

#[derive(Deserialize)]
struct Field {
    id: Option<String>,
    label: Option<String>,
    section: Option<FieldSection>,
    value: Option<Zeroizing<String>>,
}

#[derive(Deserialize)]
struct FieldSection {
    id: String,
}

/// Reads the field that `read` refers to.
pub(super) async fn read(requests: &OwnRequests, read: &StoreRead) -> Result<StoreValue, MintError> {
    let StoreItem::OnePassword { vault, item, section, field } = &read.item else {
        return Err(MintError::lasting("not an item of 1Password"));
    };
    let vault = match is_id(vault) {
        true => vault.clone(),
        false => only(get(requests, read, &filtered(path(["v1", "vaults"]), "name", vault)).await?, "vault", "name")?,
    };
    let item = match is_id(item) {
        true => item.clone(),
        false => {
            let list = filtered(path(["v1", "vaults", &vault, "items"]), "title", item);
            only(get(requests, read, &list).await?, "item", "title")?
        }
    };
    let item: Item = get(requests, read, &path(["v1", "vaults", &vault, "items", &item])).await?;
    // The id of an AWS key is in the configuration: a reference names one field.
    let key = |key: &FetchedAwsKey| match &key.access_key_id {
        FetchedKeyId::Text(id) => Some(AwsKey { access_key_id: id.clone(), session_token: None }),
        FetchedKeyId::Member(_) => None,
    };
    let aws_key = read.aws_key.as_ref().and_then(key);
    Ok(StoreValue { value: item.value(section.as_deref(), field)?, aws_key, life: None })
}

/// Returns true for the id of a vault or an item. A name with this form has to be given as its id.
fn is_id(text: &str) -> bool {
    text.len() == 26 && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

fn filtered(path: String, attribute: &str, name: &str) -> String {
    let filter = format!("{attribute} eq \"{name}\"");
    format!("{path}?filter={}", percent_encoding::utf8_percent_encode(&filter, super::NOT_IN_SEGMENT))
}

async fn get<T: DeserializeOwned>(requests: &OwnRequests, read: &StoreRead, path: &str) -> Result<T, MintError> {
    let token = read.server.secret("token").ok_or_else(|| MintError::lasting("the store has no token"))?;
    let mut request = StoreRequest::get(path.to_owned());
    request.secrets.push((AUTHORIZATION, bearer(token)?));
    parsed(&request.send(requests, &read.server).await?)
}

/// Returns the id of the only one in a list.
fn only(list: Vec<Named>, kind: &str, by: &str) -> Result<String, MintError> {
    match <[Named; 1]>::try_from(list) {
        Ok([Named { id }]) if is_id(&id) => Ok(id),
        Ok(_) => Err(MintError::lasting("the answer is not that of such a store")),
        Err(list) if list.is_empty() => Err(MintError::lasting(format!("there is no {kind} with this {by}"))),
        Err(_) => Err(MintError::lasting(format!("several {kind}s have this {by}; its id tells them apart"))),
    }
}

impl Item {
    /// Returns the value of a field by its label or id, in a section or anywhere. References of 1Password ignore case.
    fn value(&self, section: Option<&str>, name: &str) -> Result<Secret, MintError> {
        let is = |text: Option<&str>, name: &str| text.is_some_and(|text| text.eq_ignore_ascii_case(name));
        let sections: Vec<&str> = match section {
            None => Vec::new(),
            Some(name) => {
                let named = |it: &&Section| is(Some(&it.id), name) || is(it.label.as_deref(), name);
                self.sections.iter().filter(named).map(|section| &*section.id).collect()
            }
        };
        let is_there = |field: &&Field| {
            let of = field.section.as_ref().map(|section| &*section.id);
            section.is_none() || of.is_some_and(|of| sections.contains(&of))
        };
        let named = |field: &&Field| is(field.id.as_deref(), name) || is(field.label.as_deref(), name);
        let found: Vec<&Field> = self.fields.iter().filter(is_there).filter(named).collect();
        let without_section: Vec<&Field> = found.iter().copied().filter(|field| field.section.is_none()).collect();
        let field = match (found.as_slice(), without_section.as_slice()) {
            ([field], _) | (_, [field]) => *field,
            ([], _) => return Err(MintError::lasting("the item has no such field")),
            _ => return Err(MintError::lasting("several fields have this label; a section or an id tells them apart")),
        };
        let value = field.value.as_ref().ok_or_else(|| MintError::lasting("the field has no value"))?;
        Ok(Secret::new(value.as_bytes().to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_label_id_and_section() {
        let item: Item = serde_json::from_str(
            r#"{"id":"x","title":"GitHub","sections":[{"id":"s1","label":"API"},{"id":"s2"}],"fields":[
                {"id":"username","label":"username","value":"u","purpose":"USERNAME"},
                {"id":"f1","label":"token","value":"one","section":{"id":"s1"}},
                {"id":"f2","label":"token","value":"two","section":{"id":"s2"}},
                {"id":"f3","label":"key","value":"three"},
                {"id":"f4","label":"key","value":"four","section":{"id":"s2"}},
                {"id":"f5","label":"empty"}]}"#,
        )
        .unwrap();
        let rows = [
            (None, "username", Ok("u")),
            (None, "USERNAME", Ok("u")),
            (Some("API"), "token", Ok("one")),
            (Some("api"), "token", Ok("one")),
            (Some("s2"), "token", Ok("two")),
            (None, "f2", Ok("two")),
            (None, "key", Ok("three")),
            (Some("s2"), "key", Ok("four")),
            (None, "token", Err("several fields")),
            (None, "none", Err("no such field")),
            (Some("s3"), "token", Err("no such field")),
            (Some("s1"), "username", Err("no such field")),
            (None, "empty", Err("no value")),
        ];
        for (section, name, want) in rows {
            match (item.value(section, name), want) {
                (Ok(found), Ok(want)) => assert_eq!(found.expose(), want.as_bytes(), "{section:?} {name}"),
                (Err(error), Err(want)) => assert!(error.reason.contains(want), "{section:?} {name}: {error:?}"),
                (found, _) => panic!("{section:?} {name}: {:?}", found.err()),
            }
        }
    }
}
