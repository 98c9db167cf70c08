//! Bounds the work that a schema's references can cause, before the schema is compiled.
//!
//! The validator visits a subschema once for each path that leads to it, so references can multiply: two references to
//! each of thirty definitions in a row, or two from a schema back to itself, which doubles the work with each level of
//! the arguments. Subschemas and their references form a directed graph. Where it has no cycle, the number of paths is
//! counted. A cycle is accepted only if no subschema in it has two paths within it: then each part of the arguments is
//! visited once.

use std::collections::HashMap;

use percent_encoding::percent_decode_str;
use serde_json::{Map, Value};

use super::mapping::quoted;
use super::place::Place;

/// Maximum number of visits that one value can cost. A pack without references is too small for so many subschemas.
const MAX_WEIGHT: u64 = 100_000;
/// Maximum number of nested subschemas, which are all on the stack at once.
const MAX_CHAIN: usize = 128;
/// Maximum number of subschemas in a cycle. All of them are on the stack once for each level of the arguments.
const MAX_CYCLE: usize = 32;

/// Keywords that hold a mapping from names to subschemas.
const MAPPINGS: [&str; 4] = ["dependencies", "dependentSchemas", "patternProperties", "properties"];
/// Keywords that hold values, or definitions that only count where they are referenced.
const NO_SUBSCHEMAS: [&str; 7] = ["$defs", "const", "default", "definitions", "enum", "example", "examples"];
/// Keywords whose subschemas apply to parts of the value.
const INTO_PARTS: [&str; 10] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "items",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
];
/// Keywords that a cycle may include. The validator runs the subschemas of other keywords more than once for each
/// visit.
const MAY_RECUR: [&str; 9] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "items",
    "oneOf",
    "prefixItems",
    "properties",
];
/// Keywords that run all other subschemas of their schema again.
const REPEATING: [&str; 2] = ["unevaluatedItems", "unevaluatedProperties"];

/// The position of a schema that costs too much, and the reason.
pub(super) type Fault = (Place, String);

/// The maximum number of visits that one value of the arguments can cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Weight {
    pub(super) visits: u64,
    pub(super) recurs: bool,
}

/// Computes the weight of a schema.
///
/// # Errors
/// [`Fault`] for a reference that leaves the schema or depends on the context, and for work that multiplies.
pub(super) fn weight(schema: &Value, place: &Place) -> Result<Weight, Fault> {
    refuse_resources(schema, place)?;
    let graph = Graph::of(schema, place)?;
    let mut search = Search::new(graph);
    let root = search.visit(0, 0)?;
    Ok(Weight { visits: root.visits, recurs: search.recurs })
}

/// Refuses embedded schema resources, in which `#` has another meaning. No pack needs them.
fn refuse_resources(schema: &Value, place: &Place) -> Result<(), Fault> {
    let is_old = schema
        .get("$schema")
        .and_then(Value::as_str)
        .is_some_and(|draft| ["draft-03", "draft-04"].iter().any(|old| draft.contains(old)));
    let mut pending = vec![(schema, place.clone())];
    while let Some((value, here)) = pending.pop() {
        match value {
            Value::Array(items) => pending.extend(items.iter().enumerate().map(|(at, item)| (item, here.at(at)))),
            Value::Object(members) => {
                for (key, member) in members {
                    let names = matches!(key.as_str(), "$id" | "$schema") || (is_old && key == "id");
                    if names && member.is_string() && !std::ptr::eq(value, schema) {
                        return Err((here.key(key), format!("{key} is allowed only at the beginning of a schema")));
                    }
                    if member.is_object() || member.is_array() {
                        pending.push((member, here.key(key)));
                    }
                }
            }
            Value::Bool(_) | Value::Null | Value::Number(_) | Value::String(_) => {}
        }
    }
    Ok(())
}

/// The reachable subschemas, the root first.
struct Graph(Vec<Subschema>);

struct Subschema {
    place: Place,
    /// Visits, not counting those of other subschemas.
    own: u64,
    repeats: bool,
    edges: Vec<Edge>,
}

#[derive(Clone, Copy)]
struct Edge {
    to: usize,
    into_part: bool,
    may_recur: bool,
}

/// The state while the graph is built.
struct Reading<'s> {
    root: &'s Value,
    root_place: Place,
    numbers: HashMap<*const Value, usize>,
    found: Vec<(&'s Value, Place)>,
}

impl Graph {
    fn of(root: &Value, place: &Place) -> Result<Self, Fault> {
        let mut reading = Reading { root, root_place: place.clone(), numbers: HashMap::new(), found: Vec::new() };
        reading.number(root, place.clone());
        let mut all = Vec::new();
        while let Some((value, place)) = reading.found.get(all.len()).cloned() {
            let Value::Object(members) = value else {
                all.push(Subschema { place, own: 1, repeats: false, edges: Vec::new() });
                continue;
            };
            let listed = members.get("enum").and_then(Value::as_array).map_or(0, Vec::len) as u64;
            let repeats = REPEATING.iter().any(|keyword| members.contains_key(*keyword));
            let edges = reading.edges(members, &place)?;
            all.push(Subschema { place, own: listed.saturating_add(1), repeats, edges });
        }
        Ok(Self(all))
    }
}

impl<'s> Reading<'s> {
    /// Returns the number of a subschema. A new one is queued.
    fn number(&mut self, value: &'s Value, place: Place) -> usize {
        let next = self.found.len();
        let number = *self.numbers.entry(std::ptr::from_ref(value)).or_insert(next);
        if number == next {
            self.found.push((value, place));
        }
        number
    }

    fn edges(&mut self, members: &'s Map<String, Value>, place: &Place) -> Result<Vec<Edge>, Fault> {
        let mut edges = Vec::new();
        for (keyword, value) in members {
            let here = place.key(keyword);
            let name = keyword.as_str();
            let mut push = |to| {
                let (into_part, may_recur) = (INTO_PARTS.contains(&name), MAY_RECUR.contains(&name));
                edges.push(Edge { to, into_part, may_recur });
            };
            match value {
                Value::String(target) if name == "$ref" => {
                    let (target, at) = self.target(target).map_err(|why| (here, why))?;
                    push(self.number(target, at));
                }
                _ if matches!(name, "$dynamicRef" | "$recursiveRef") => {
                    return Err((here, format!("{name} is not followed here; write $ref")));
                }
                _ if NO_SUBSCHEMAS.contains(&name) => {}
                Value::Object(named) if MAPPINGS.contains(&name) => {
                    for (key, value) in named.iter().filter(|(_, value)| value.is_object()) {
                        push(self.number(value, here.key(key)));
                    }
                }
                Value::Object(_) => push(self.number(value, here)),
                Value::Array(items) => {
                    for (at, item) in items.iter().enumerate().filter(|(_, item)| item.is_object()) {
                        push(self.number(item, here.at(at)));
                    }
                }
                Value::Bool(_) | Value::Null | Value::Number(_) | Value::String(_) => {}
            }
        }
        Ok(edges)
    }

    /// Resolves `#` and JSON pointers (RFC 6901 §6).
    fn target(&self, reference: &str) -> Result<(&'s Value, Place), String> {
        let shown = quoted(reference);
        let fragment = reference.strip_prefix('#').ok_or_else(|| format!("{shown} leads out of the schema"))?;
        let pointer = percent_decode_str(fragment).decode_utf8().map_err(|_| format!("{shown} is not a reference"))?;
        if !pointer.is_empty() && !pointer.starts_with('/') {
            return Err(format!("{shown} is not a JSON pointer; write #/$defs/NAME"));
        }
        let found = self.root.pointer(&pointer).ok_or_else(|| format!("{shown} leads nowhere"))?;
        let mut place = self.root_place.clone();
        let mut here = self.root;
        for step in pointer.split('/').skip(1) {
            let step = step.replace("~1", "/").replace("~0", "~");
            let index = step.parse().ok().filter(|_| here.is_array());
            place = index.map_or_else(|| place.key(&step), |index| place.at(index));
            here = index.map_or_else(|| here.get(&step), |index| here.get(index)).unwrap_or(&Value::Null);
        }
        Ok((found, place))
    }
}

/// Finds cycles (strongly connected components, after Tarjan) and counts paths. Components are counted after those that
/// they lead to.
struct Search {
    graph: Graph,
    entered: Vec<Option<usize>>,
    counted: Vec<Option<Counted>>,
    stack: Vec<usize>,
    clock: usize,
    recurs: bool,
}

/// The count of a subschema, including everything it leads to.
#[derive(Clone, Copy, Default)]
struct Counted {
    visits: u64,
    chain: usize,
}

/// The earliest subschema on the stack that one leads back to, and its count once known.
struct Visited {
    low: usize,
    visits: u64,
}

impl Search {
    fn new(graph: Graph) -> Self {
        let size = graph.0.len();
        let (entered, counted) = (vec![None; size], vec![None; size]);
        Self { graph, entered, counted, stack: Vec::new(), clock: 0, recurs: false }
    }

    fn subschema(&self, number: usize) -> Result<&Subschema, Fault> {
        // `Reading` assigns the numbers, one for each entry.
        self.graph.0.get(number).ok_or_else(|| (Place::default(), "cannot be read".to_owned()))
    }

    fn visit(&mut self, number: usize, depth: usize) -> Result<Visited, Fault> {
        if depth > MAX_CHAIN {
            return Err(self.too_deep(number));
        }
        let entered = self.clock;
        self.clock = self.clock.saturating_add(1);
        set(&mut self.entered, number, entered);
        self.stack.push(number);
        let mut low = entered;
        for edge in self.subschema(number)?.edges.clone() {
            match (self.entered.get(edge.to).copied().flatten(), self.counted.get(edge.to).copied().flatten()) {
                (None, _) => low = low.min(self.visit(edge.to, depth.saturating_add(1))?.low),
                (Some(earlier), None) => low = low.min(earlier),
                (Some(_), Some(_)) => {}
            }
        }
        let mut visits = 0;
        if low == entered {
            let from = self.stack.iter().rposition(|one| *one == number).unwrap_or_default();
            let component = self.stack.split_off(from);
            visits = self.count(&component)?.visits;
        }
        Ok(Visited { low, visits })
    }

    /// Counts a component. Refuses one that multiplies.
    fn count(&mut self, component: &[usize]) -> Result<Counted, Fault> {
        let first = component.first().copied().unwrap_or_default();
        if component.len() > MAX_CYCLE {
            return Err(self.too_deep(first));
        }
        let mut sum = Counted::default();
        let mut goes_into_parts = false;
        let mut is_cycle = false;
        for number in component {
            let subschema = self.subschema(*number)?;
            let within = |edge: &Edge| component.contains(&edge.to);
            let (inner, outer): (Vec<Edge>, Vec<Edge>) = subschema.edges.iter().copied().partition(within);
            let refused = |why: &str| Err((subschema.place.clone(), why.to_owned()));
            if inner.len() > 1 {
                return refused("the schema refers to itself in more than one way from here: checks would not end");
            }
            for edge in inner {
                is_cycle = true;
                goes_into_parts |= edge.into_part;
                if !edge.may_recur || subschema.repeats {
                    return refused(
                        "a schema may refer to itself through properties, items, allOf, anyOf and oneOf only",
                    );
                }
            }
            let mut own = subschema.own;
            for edge in outer {
                let behind = self.counted.get(edge.to).copied().flatten().unwrap_or_default();
                // Subschemas that these keywords apply repeatedly can be nested in each other.
                let times = if subschema.repeats { 3 } else { 1 };
                own = own.saturating_add(behind.visits.saturating_mul(times));
                sum.chain = sum.chain.max(behind.chain);
            }
            sum.visits = sum.visits.saturating_add(own);
            if sum.visits > MAX_WEIGHT {
                return refused("its references expand to too many subschemas");
            }
        }
        if is_cycle && !goes_into_parts {
            return Err((self.subschema(first)?.place.clone(), "refers to itself and nothing else".to_owned()));
        }
        sum.chain = sum.chain.saturating_add(component.len());
        if sum.chain > MAX_CHAIN {
            return Err(self.too_deep(first));
        }
        self.recurs |= is_cycle;
        component.iter().for_each(|number| set(&mut self.counted, *number, sum));
        Ok(sum)
    }

    fn too_deep(&self, number: usize) -> Fault {
        let place = self.subschema(number).map(|one| one.place.clone()).unwrap_or_default();
        (
            place,
            format!(
                "references and subschemas are nested deeper than {MAX_CHAIN}, or a circle is longer than {MAX_CYCLE}"
            ),
        )
    }
}

fn set<T>(all: &mut [Option<T>], number: usize, value: T) {
    if let Some(slot) = all.get_mut(number) {
        *slot = Some(value);
    }
}
