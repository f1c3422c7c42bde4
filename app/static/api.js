// Requests to the service, with the API key if there is one; it knows nothing of the page.

const NAME = "phalanx-api-key";
let key = sessionStorage.getItem(NAME) ?? "";

/** The service wants a key, or another one. */
export class Locked extends Error {}

export const hasKey = () => key !== "";

export function useKey(value) {
  key = value;
  if (key) sessionStorage.setItem(NAME, key);
  else sessionStorage.removeItem(NAME);
}

/** fetch, except that a 401 is Locked. A TypeError or TimeoutError says that nobody answered. */
export async function ask(path, { headers = {}, ...options } = {}) {
  if (!/^[\x20-\x7e]*$/.test(key)) throw new Locked(); // no header can carry it
  const answer = await fetch(path, {
    cache: "no-store",
    headers: key ? { ...headers, "X-API-Key": key } : headers,
    ...options,
  });
  if (answer.status === 401) throw new Locked();
  return answer;
}
